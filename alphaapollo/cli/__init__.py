"""The command `alphaapollo`: doors to what the other rooms do. Nothing below imports it."""
