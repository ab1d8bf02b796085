"""The program text that loads the driver's modules, also in new Python processes of the driver's children."""

from __future__ import annotations

# `parts` are pairs of a module's name and its text or code object; each module follows the modules that it
# imports. At the end, the function removes the modules from sys.modules, so that imports of the code never find them.
# The driver has its own copies of the builtins and of some modules, so code that patches these does not affect it.
LOAD = """
def load(parts):
    import builtins, sys
    names, own_builtins, own_modules = [], dict(vars(builtins)), dict()
    for name, part in parts:
        module = type(sys)("_rlm_batch." + name)
        module.__package__ = module.__name__.rpartition(".")[0]
        module.__builtins__ = own_builtins
        sys.modules[module.__name__] = module
        names.append(module.__name__)
        if isinstance(part, str):
            part = compile(part, {prefix!r} + name.replace(".", "/") + ".py", "exec", dont_inherit=True)
        exec(part, module.__dict__)
        for key in ("os", "gc", "time", "select"):
            if hasattr(module, key):
                if key not in own_modules:
                    own_modules[key] = type(sys)(key)
                    vars(own_modules[key]).update(vars(getattr(module, key)))
                setattr(module, key, own_modules[key])
        if name == "driver.child.fresh_python":
            module.driver_parts = parts
    for name in names:
        del sys.modules[name]
    return module
"""
