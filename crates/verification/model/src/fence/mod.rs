//! Resources and their database, in four models that are searched one by one: the writes of
//! holders, rows that are removed, writes that are repeated under a key, and writes to several
//! resources.

pub mod floors;
pub mod keys;
pub mod several;
pub mod writes;
