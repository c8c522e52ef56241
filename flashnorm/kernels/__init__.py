"""How a row program runs, in CuTe DSL. `tile` is pure Python; every other module here imports the DSL."""
