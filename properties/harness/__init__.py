"""What every contract shares, in the order in which to read it.

contract    how a component may refuse, what it can get wrong, how it declares what it can do
trial       one component beside its model: carries operations out, and checks everything after each
operation   operations as data; `letters` has those that are drawn
suite       `Suite`, a contract; `Component`, a component under check, which runs a history
swarm       runs histories until one fails; `shrink` makes it short, `cases` stores it, `report` tells it
machines    the same for Hypothesis
mutants     planted defects, and whether they are found
importing   the component that a user names
"""
