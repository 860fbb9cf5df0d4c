"""Reports what radixtrain would save on a data set, before anything is trained."""
