"""What is to be predicted: folders, lists, archives, tables, URLs, cut into shards."""
