//! What the fuzz targets reach of the stores.

pub(crate) use super::{memory::fuzz as memory, redis::fuzz as redis};
