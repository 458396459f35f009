"""Triton's interpreter, mended for NumPy 2.5 and for products of bfloat16, and made faster."""

import os
from inspect import getmembers
from typing import Any


def patch_interpreter() -> None:
    """Patch the interpreter where it runs the kernels (TRITON_INTERPRET=1), and do nothing elsewhere."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    patch, multiply = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        # int() of an array of one element is an error since NumPy 2.5.
        scope.set_attr(tensor, "__index__", lambda value: value.handle.data.item())

    def in_float32(operand: Any) -> Any:
        if operand.dtype.scalar is not tl.bfloat16:
            return operand
        return interpreter.TensorHandle((operand.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def dot(builder: Any, a: Any, b: Any, *rest: Any) -> Any:
        """The interpreter keeps bfloat16 as bits, and would multiply those."""
        return multiply(builder, in_float32(a), in_float32(b), *rest)

    packages = (tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base)
    names = {each: [name for name, member in getmembers(each) if tl.core.is_builtin(member)] for each in packages}

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        """The interpreter looks for them among all members at each call of a function."""
        for name in names[package]:
            member = getattr(package, name)
            if tl.core.is_builtin(member):  # not patched already, by the function that calls this one
                interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_builtin = patch_builtin
    interpreter._patch_lang_tensor = patched
    interpreter.InterpreterBuilder.create_dot = dot
