//! What the fuzz targets reach of the stores.

pub(crate) use super::{embedded::fuzz as embedded, etcd::fuzz as etcd, redis::fuzz as redis};
