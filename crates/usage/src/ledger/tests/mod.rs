use super::*;

mod cases;
mod properties;
