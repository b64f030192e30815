"""Starting a run on machines elsewhere: TPU VMs, a GKE cluster, SLURM.

Each module writes the commands and files of one of them, and runs the user's own `gcloud`,
`kubectl` or `sbatch`. Nothing here needs JAX. What starts there is `maxmars train` on the user's
checkout, packed; it stops with exit code 75 when it is to be started again.
"""
