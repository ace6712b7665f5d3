//! TLS certificates of an authority, a server on 127.0.0.1, and a client, created with openssl.

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
        let authority = ["basicConstraints=critical,CA:TRUE"];
        made.openssl("authority", "/CN=authority", &authority, &[]);
        made.make_signed("server", "/CN=server");
        // With authentication enabled, etcd refuses client certificates that have a common name.
        made.make_signed("client", "/");
        made
    }

    /// Creates another certificate for the same server. Returns its path and the path of its key.
    pub fn another_server(&self) -> (PathBuf, PathBuf) {
        self.make_signed("another", "/CN=another");
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

    fn make_signed(&self, name: &str, subject: &str) {
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
        self.openssl(name, subject, &server, &signed_by);
    }

    /// Returns a client that trusts only this authority, and presents a certificate that it signed.
    #[cfg(feature = "program")]
    pub fn client(&self) -> reqwest::Client {
        let read = |name| std::fs::read(self.path(name)).unwrap();
        let authority = reqwest::Certificate::from_pem(&read("authority.pem")).unwrap();
        let own = [read("client.key"), read("client.pem")].concat();
        let builder = crate::http::client_builder()
            .tls_certs_only([authority])
            .identity(reqwest::Identity::from_pem(&own).unwrap());
        builder.build().unwrap()
    }

    /// Returns the arguments with which etcd presents the server's certificate, and requires a
    /// certificate from each client.
    pub fn etcd_arguments(&self) -> Vec<PathBuf> {
        let mut arguments = vec!["--client-cert-auth".into()];
        for (option, file) in [
            ("--cert-file", "server.pem"),
            ("--key-file", "server.key"),
            ("--trusted-ca-file", "authority.pem"),
        ] {
            arguments.extend([option.into(), self.path(file)]);
        }
        arguments
    }

    fn openssl(&self, name: &str, subject: &str, extensions: &[&str], more: &[&str]) {
        let made = Command::new("openssl")
            .args([
                "req",
                "-x509",
                "-newkey",
                "ec",
                "-pkeyopt",
                "ec_paramgen_curve:P-256",
            ])
            .args(["-nodes", "-days", "2", "-subj", subject])
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
