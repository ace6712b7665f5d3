//! etcd: the shared one, and clusters that a test may stop and restore.

/// The shared server. Tests use a key prefix of their own on it.
pub fn shared_url() -> String {
    super::variable("TEST_ETCD_URL")
}
