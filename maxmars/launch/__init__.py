"""Starting a run on machines elsewhere: TPU VMs, a GKE cluster, SLURM. See README.md.

Each platform's module writes its commands and files, and runs the user's own `gcloud`, `kubectl` or
`sbatch`. Nothing here needs JAX.
"""
