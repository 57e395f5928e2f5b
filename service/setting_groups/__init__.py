"""The groups of settings, one module each as in the help and in the file; `group` and `values` are what they share."""
