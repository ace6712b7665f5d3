//! TLS certificates from openssl: one of an authority, and one of a server on 127.0.0.1.

use std::{net::SocketAddr, path::PathBuf, process::Command, sync::Arc};

use tempfile::TempDir;

#[derive(Clone)]
pub struct Certificates {
    folder: Arc<TempDir>,
}

impl Certificates {
    pub fn make() -> Self {
        let folder = Arc::new(tempfile::tempdir().unwrap());
        let made = Self { folder };
        made.openssl("authority", &["basicConstraints=critical,CA:TRUE"], &[]);
        made.make_server("server");
        made
    }

    /// Creates another certificate for the same server. Returns its path and the path of its key.
    pub fn another_server(&self) -> (PathBuf, PathBuf) {
        self.make_server("another");
        (self.path("another.pem"), self.path("another.key"))
    }

    /// Returns the certificate that a server presents.
    pub fn shown_by(&self, addr: SocketAddr) -> String {
        let script = "openssl s_client -connect \"$0\" </dev/null 2>/dev/null | openssl x509";
        let shown = Command::new("sh")
            .args(["-c", script, &addr.to_string()])
            .output()
            .unwrap();
        String::from_utf8(shown.stdout).unwrap()
    }

    fn make_server(&self, name: &str) {
        let (authority, key) = (self.path("authority.pem"), self.path("authority.key"));
        let signed_by = [
            "-CA",
            authority.to_str().unwrap(),
            "-CAkey",
            key.to_str().unwrap(),
        ];
        let server = [
            "basicConstraints=critical,CA:FALSE",
            "subjectAltName=IP:127.0.0.1",
        ];
        self.openssl(name, &server, &signed_by);
    }

    /// Returns a client that trusts only this authority.
    #[cfg(feature = "program")]
    pub fn client(&self) -> reqwest::Client {
        let authority = std::fs::read(self.path("authority.pem")).unwrap();
        let authority = reqwest::Certificate::from_pem(&authority).unwrap();
        let builder = crate::http::client_builder().tls_certs_only([authority]);
        builder.build().unwrap()
    }

    /// Returns the arguments with which etcd uses the server's certificate.
    pub fn server_arguments(&self) -> [PathBuf; 4] {
        let [certificate, key] = ["--cert-file", "--key-file"].map(PathBuf::from);
        [
            certificate,
            self.path("server.pem"),
            key,
            self.path("server.key"),
        ]
    }

    fn openssl(&self, name: &str, extensions: &[&str], more: &[&str]) {
        let made = Command::new("openssl")
            .args([
                "req",
                "-x509",
                "-newkey",
                "ec",
                "-pkeyopt",
                "ec_paramgen_curve:P-256",
            ])
            .args(["-nodes", "-days", "2", "-subj", &format!("/CN={name}")])
            .arg("-keyout")
            .arg(self.path(&format!("{name}.key")))
            .arg("-out")
            .arg(self.path(&format!("{name}.pem")))
            .args(
                extensions
                    .iter()
                    .flat_map(|extension| ["-addext", extension]),
            )
            .args(more)
            .output()
            .expect("openssl is not installed: use tests/run");
        assert!(made.status.success(), "{made:?}");
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}
