"""From a model to a plan or a running step: the way all go, `parallelize` and `fit`."""
