"""Ways to run a model, as the sampler or as the trainer; importing this package imports none of them.

``trueup.engines.hf`` runs transformers models and needs the extra ``trueup[hf]``.
"""
