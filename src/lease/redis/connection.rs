//! Connection to one server or to a cluster.

use redis::{
    Cmd, FromRedisValue, Pipeline, RedisFuture, RedisResult, Value,
    aio::{ConnectionLike, MultiplexedConnection},
    cluster_async::ClusterConnection,
    cluster_routing::{
        MultipleNodeRoutingInfo, ResponsePolicy, Route, RoutingInfo, SingleNodeRoutingInfo,
        SlotAddr,
    },
};

/// Connection for commands or for subscriptions. Clones share the connection.
#[derive(Clone)]
pub(super) enum Connection {
    Node(MultiplexedConnection),
    Cluster(ClusterConnection),
}

impl ConnectionLike for Connection {
    fn req_packed_command<'a>(&'a mut self, cmd: &'a Cmd) -> RedisFuture<'a, Value> {
        match self {
            Self::Node(connection) => connection.req_packed_command(cmd),
            Self::Cluster(connection) => connection.req_packed_command(cmd),
        }
    }

    fn req_packed_commands<'a>(
        &'a mut self,
        pipeline: &'a Pipeline,
        offset: usize,
        count: usize,
    ) -> RedisFuture<'a, Vec<Value>> {
        match self {
            Self::Node(connection) => connection.req_packed_commands(pipeline, offset, count),
            Self::Cluster(connection) => connection.req_packed_commands(pipeline, offset, count),
        }
    }

    fn get_db(&self) -> i64 {
        match self {
            Self::Node(connection) => connection.get_db(),
            Self::Cluster(connection) => connection.get_db(),
        }
    }
}

impl Connection {
    /// Returns the first slot of each server. For a standalone server, returns one slot.
    pub(super) async fn shards(&mut self) -> RedisResult<Vec<u16>> {
        let Self::Cluster(connection) = self else {
            return Ok(vec![0]);
        };
        let mut ranges = vec![];
        for range in ranges_of(connection).await? {
            if let [first, _, master, ..] = &range[..] {
                ranges.push((redis::from_redis_value_ref::<u16>(first)?, master.clone()));
            }
        }
        ranges.sort_unstable_by_key(|(first, _)| *first);
        let (mut shards, mut masters) = (vec![], vec![]);
        for (first, master) in ranges {
            if !masters.contains(&master) {
                shards.push(first);
                masters.push(master);
            }
        }
        Ok(shards)
    }

    /// Returns the addresses of all nodes of a cluster, as one node reports them.
    pub(super) async fn nodes(&mut self) -> RedisResult<Vec<(String, u16)>> {
        let Self::Cluster(connection) = self else {
            return Ok(vec![]);
        };
        let ranges = ranges_of(connection).await?;
        let mut nodes = vec![];
        for node in ranges.iter().flatten() {
            // A node whose address is unknown is skipped.
            if let Value::Array(fields) = node
                && let [host, port, ..] = &fields[..]
                && let Ok(host) = redis::from_redis_value_ref::<String>(host)
                && let Ok(port) = redis::from_redis_value_ref(port)
                && !matches!(&*host, "" | "?")
                && !nodes.contains(&(host.clone(), port))
            {
                nodes.push((host, port));
            }
        }
        Ok(nodes)
    }

    /// Sends a command to the server of a slot.
    pub(super) async fn ask_shard<T: FromRedisValue>(
        &mut self,
        slot: u16,
        command: &Cmd,
    ) -> RedisResult<T> {
        let Self::Cluster(connection) = self else {
            return command.query_async(self).await;
        };
        let route = SingleNodeRoutingInfo::SpecificNode(Route::new(slot, SlotAddr::Master));
        let answer = connection.route_command(command.clone(), RoutingInfo::SingleNode(route));
        Ok(redis::from_redis_value(answer.await?.extract_error()?)?)
    }

    /// Subscribes to channels of one slot, on the server of the slot. A repeated subscription has
    /// no effect, but the server answers it, which shows that the connection works.
    pub(super) async fn subscribe(&self, channels: &[String]) -> RedisResult<()> {
        match self.clone() {
            Self::Node(mut connection) => connection.subscribe(channels).await,
            Self::Cluster(mut connection) => {
                // A master that has become a replica still accepts subscriptions, but SPUBLISH on
                // the new master does not count them. EXISTS detects this case, because a command
                // with a key is redirected to the new master.
                if let Some(same_slot) = channels.first() {
                    let exists = redis::cmd("EXISTS").arg(same_slot).take();
                    exists.query_async::<()>(&mut connection).await?;
                }
                connection.ssubscribe(channels).await
            }
        }
    }
}

/// Returns the ranges of slots, as one node reports them. Each range consists of the first slot,
/// the last slot, the master, and its replicas. Takes the first answer, because other nodes may not
/// respond. If all connections are broken, the client then replaces all of them.
async fn ranges_of(connection: &mut ClusterConnection) -> RedisResult<Vec<Vec<Value>>> {
    let slots = redis::cmd("CLUSTER").arg("SLOTS").take();
    let first = (
        MultipleNodeRoutingInfo::AllNodes,
        Some(ResponsePolicy::OneSucceeded),
    );
    let answer = connection.route_command(slots, RoutingInfo::MultiNode(first));
    Ok(redis::from_redis_value(answer.await?.extract_error()?)?)
}
