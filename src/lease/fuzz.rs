//! What the fuzz targets reach of the stores.

pub(crate) use super::{embedded::fuzz as embedded, quorum::fuzz as quorum, redis::fuzz as redis};
