//! Source of connections: a standalone server, the master that sentinels report, or a cluster.

use std::{
    sync::{Arc, PoisonError},
    time::Duration,
};

use redis::{
    AsyncConnectionConfig, Client, ConnectionAddr, ConnectionInfo, ErrorKind, IntoConnectionInfo,
    ProtocolVersion, PushInfo, RedisError, RedisResult, cluster::ClusterClientBuilder,
    sentinel::SentinelClient,
};
use tokio::sync::{Mutex, mpsc};

use super::connection::Connection;

/// Servers of a store, to which connections are opened.
pub(super) struct Source {
    servers: Servers,
    /// The addresses of the servers without passwords, for error messages.
    pub(super) address: Arc<str>,
}

enum Servers {
    Alone(Box<Client>),
    /// The sentinels, with the number of the master's database.
    Sentinels(Box<Mutex<SentinelClient>>, i64),
    Cluster {
        settings: ClusterSettings,
        configured: Vec<ConnectionInfo>,
        /// Nodes that an earlier connection has discovered. They are used if no configured node
        /// responds.
        discovered: std::sync::Mutex<Vec<ConnectionInfo>>,
    },
}

/// Function that creates the settings of a cluster client for each connection, because the settings
/// cannot be cloned.
type ClusterSettings = Box<dyn Fn(Vec<ConnectionInfo>) -> ClusterClientBuilder + Send + Sync>;

impl Source {
    /// Uses the server of a client of the application.
    pub(super) fn of_client(client: Client) -> Self {
        let address = client.get_connection_info().addr().to_string();
        Self::new(Servers::Alone(Box::new(client)), &address)
    }

    /// Uses the master that the application's sentinel client finds, and this database of the
    /// master.
    pub(super) fn of_sentinels(client: SentinelClient, database: i64, address: &str) -> Self {
        let servers = Servers::Sentinels(Box::new(Mutex::new(client)), database);
        Self::new(servers, address)
    }

    /// Uses the cluster of these nodes with the settings of the application, which are checked now.
    pub(super) fn of_cluster(
        nodes: &[&str],
        settings: impl Fn(ClusterClientBuilder) -> ClusterClientBuilder + Send + Sync + 'static,
    ) -> RedisResult<Self> {
        let nodes = nodes.iter().map(|url| url.into_connection_info());
        let configured = nodes.collect::<RedisResult<Vec<_>>>()?;
        // The addresses contain no passwords.
        let addresses = configured.iter().map(|node| node.addr().to_string());
        let address = format!("the cluster {}", addresses.collect::<Vec<_>>().join(", "));
        if configured
            .iter()
            .any(|node| node.redis_settings().db() != 0)
        {
            return Err(RedisError::from((
                ErrorKind::InvalidClientConfig,
                "the URL of a node of a cluster must not name a database other than 0",
            )));
        }
        let settings: ClusterSettings =
            Box::new(move |nodes| settings(ClusterClientBuilder::new(nodes)).database_id(0));
        settings(configured.clone()).build()?;
        let servers = Servers::Cluster {
            settings,
            configured,
            discovered: std::sync::Mutex::default(),
        };
        Ok(Self::new(servers, &address))
    }

    fn new(servers: Servers, address: &str) -> Self {
        Self {
            servers,
            address: address.into(),
        }
    }

    /// Returns whether keys are spread over several servers.
    pub(super) const fn is_cluster(&self) -> bool {
        matches!(self.servers, Servers::Cluster { .. })
    }

    /// Returns the database number, which separates keys but not channels.
    pub(super) fn database(&self) -> i64 {
        match &self.servers {
            Servers::Alone(client) => client.get_connection_info().redis_settings().db(),
            Servers::Sentinels(_, database) => *database,
            Servers::Cluster { .. } => 0,
        }
    }

    /// Records the nodes that a connection to a cluster has discovered, for later connections. If
    /// no node answers with addresses, the nodes that were recorded earlier are kept.
    pub(super) async fn note_nodes_of(&self, mut connection: Connection) {
        let Servers::Cluster {
            configured,
            discovered,
            ..
        } = &self.servers
        else {
            return;
        };
        if let (Ok(nodes), Some(like)) = (connection.nodes().await, configured.first())
            && !nodes.is_empty()
        {
            let nodes = nodes.into_iter().map(|node| with_address(like, node));
            *discovered.lock().unwrap_or_else(PoisonError::into_inner) = nodes.collect();
        }
    }

    /// Opens a connection with these timeouts for the connection and for each of its commands. If
    /// `pushes` is given, the connection can subscribe to channels, and sends published messages to
    /// `pushes`.
    pub(super) async fn connect(
        &self,
        command_timeout: Duration,
        pushes: Option<mpsc::UnboundedSender<PushInfo>>,
    ) -> RedisResult<Connection> {
        let client = match &self.servers {
            Servers::Alone(client) => (**client).clone(),
            Servers::Sentinels(sentinels, database) => master(sentinels, *database).await?,
            Servers::Cluster {
                settings,
                configured,
                discovered,
            } => {
                // Only this crate knows which commands may be repeated, so the client must not
                // retry. The timeouts are fractions of the command timeout, because the client
                // waits twice for a node that does not respond before it discovers the rest of the
                // cluster.
                let connect = async |nodes| {
                    let mut builder = settings(nodes)
                        .retries(0)
                        .connection_timeout(command_timeout / 4)
                        .response_timeout(command_timeout / 2);
                    if let Some(pushes) = &pushes {
                        builder = builder
                            .use_protocol(ProtocolVersion::RESP3)
                            .push_sender(pushes.clone());
                    }
                    builder.build()?.get_async_connection().await
                };
                let connected = connect(configured.clone()).await;
                let discovered = discovered
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .clone();
                let connection = match connected {
                    Err(_) if !discovered.is_empty() => connect(discovered).await?,
                    connected => connected?,
                };
                return Ok(Connection::Cluster(connection));
            }
        };
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(command_timeout))
            .set_response_timeout(Some(command_timeout));
        let (client, config) = match pushes {
            // Push messages require protocol version 3.
            Some(pushes) => {
                let info = client.get_connection_info().clone();
                let settings = info.redis_settings().clone();
                let settings = settings.set_protocol(ProtocolVersion::RESP3);
                let client = Client::open(info.set_redis_settings(settings))?;
                (client, config.set_push_sender(pushes))
            }
            None => (client, config),
        };
        let connection = client.get_multiplexed_async_connection_with_config(&config);
        Ok(Connection::Node(connection.await?))
    }
}

/// Returns the connection information of another node of the cluster.
fn with_address(node: &ConnectionInfo, (host, port): (String, u16)) -> ConnectionInfo {
    let address = match node.addr() {
        ConnectionAddr::TcpTls {
            insecure,
            tls_params,
            ..
        } => ConnectionAddr::TcpTls {
            host,
            port,
            insecure: *insecure,
            tls_params: tls_params.clone(),
        },
        _ => ConnectionAddr::Tcp(host, port),
    };
    node.clone().set_addr(address)
}

/// Returns the client of the master that the sentinels report.
async fn master(sentinels: &Mutex<SentinelClient>, database: i64) -> RedisResult<Client> {
    let client = sentinels.lock().await.async_get_client().await?;
    if client.get_connection_info().redis_settings().db() != database {
        return Err(RedisError::from((
            ErrorKind::InvalidClientConfig,
            "the database number of the sentinels' client differs from the one that the store was given",
        )));
    }
    Ok(client)
}
