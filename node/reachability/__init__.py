"""How others reach this node: found out with their help, and made better where the router lets itself be asked."""
