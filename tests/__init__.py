"""The tests: oracles, inputs and the cases that hold every route to the contract."""
