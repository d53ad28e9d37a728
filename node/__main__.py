"""The entry point `python -m node`, which is `skipstone`. It puts the commands of `node.cli` and those of the
laboratory together, so that neither imports the other.

It stands alone because Python asks for a module of this name.
"""

from node.cli.app import app, main
from node.lab.commands.chaos import chaos
from node.lab.commands.check import check
from node.lab.commands.doctor import doctor
from node.lab.commands.simulate import simulate
from node.lab.commands.wan import wan

for command in (doctor, simulate, check, wan, chaos):
    app.command()(command)

if __name__ == "__main__":
    main()
