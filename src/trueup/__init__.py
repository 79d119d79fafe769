"""trueup measures where a model's use departs from its training, says why, closes the gap, and proves it.

Imports without torch; ``trueup.policy`` (trainer against sampler) is the place to start.
"""

from importlib.metadata import version

__version__ = version("trueup")
