"""What the flash kernels are compiled for: numbers that are constants in their code."""

from typing import NamedTuple


class Sizes(NamedTuple):
    """The constants of a launch. A kernel takes them as one plain tuple and reads its places by name: `SIZES[HEADS]`.

    A plain one, because torch.compile writes it into the source that it generates, which does not know this class
    (pytorch/pytorch#192288).

    heads: H. group: G, the heads whose outputs a program makes.
    width: K, the head width, a multiple of 8. It is read as KA columns (`main`) and KB more (`tail`; 0 for none),
        powers of two. KO (`stored`) of the KB are outputs.
    rows, columns: M and N, the sides of a tile of the maps.
    stride: elements from a token's queries, keys or values to the next token's, a multiple of 8. An image's tokens
        follow those of the image before. Outputs and gradients are dense: H·K from token to token.
    before, bias: whether W₀ and b are there. With W₀ there are too many weights for registers: they are read from the
        cache for each tile.
    by_column: queries and keys are exchanged.
    block: C, the columns that `weight_grad_kernel` makes at a time.
    """

    heads: int
    group: int
    width: int
    main: int
    tail: int
    stored: int
    rows: int
    columns: int
    stride: int
    before: bool = False
    bias: bool = False
    by_column: bool = False
    block: int = 0
