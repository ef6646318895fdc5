# ruff: noqa: A005
