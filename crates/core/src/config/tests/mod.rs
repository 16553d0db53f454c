mod bad;
mod documents;
mod good;
mod released;
