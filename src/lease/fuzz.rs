//! What the fuzz targets reach of the stores.

pub(crate) use super::{embedded::fuzz as embedded, redis::fuzz as redis};
