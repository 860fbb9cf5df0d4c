"""What radixtrain brings on a data set, before anything is trained."""
