"""The model's mathematics as functions of arrays: one file an operation, plain form beside the fast one."""
