"""What a newcomer sees who types the command and nothing else."""

WELCOME = """FedBNN trains one model over many clients whose data drift. Three commands to begin with:

  python train.py --config conf/quickstart.yaml            train on small digits for about a minute; no download
  python train.py --config conf/quickstart.yaml --dry_run  show which client meets which classes when; train nothing
  python train.py --config conf/quickstart.yaml --help     list every setting; each is a key in YAML and a flag
"""
