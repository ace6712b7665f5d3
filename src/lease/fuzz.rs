//! Entry points for the fuzz targets of the stores.

pub(crate) use super::{memory::fuzz as memory, redis::fuzz as redis};
