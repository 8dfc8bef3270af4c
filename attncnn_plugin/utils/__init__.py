def register_all_modules(init_default_scope: bool = True) -> None:
    """What ``mmengine.hub.get_model('attncnn_plugin::…')`` calls of every package: mmpretrain's own function."""
    from mmpretrain.utils import register_all_modules as register

    register(init_default_scope)
