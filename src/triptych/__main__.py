"""`python -m triptych`: the command, for launchers such as `torchrun -m triptych train JOB`."""

from triptych.cli.main import main

if __name__ == "__main__":
    main()
