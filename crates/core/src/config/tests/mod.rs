mod bad;
mod documents;
mod good;
