"""What radixtrain saves on a data set, before anything is trained."""
