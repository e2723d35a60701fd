"""How the trained weights that ship with layerscope were made; nothing here is needed to use them."""
