//! `tensor-relay relay`: receives topics from servers, and serves them to others while they arrive.

mod cache;
mod claims;
mod follower;
mod origin;
mod status;
mod topics;

use crate::{
    admin::{BoundPort, page_url},
    args::{ListenArg, ModeArg, RelayArgs},
    exit::{Exit, UsageError},
    hub::Hub,
    orphans, output,
    serve::{Listening, admission, drain, listening, print_object, report_sent, state_dir_or_default},
    sharing::{Sharing, SharingOptions},
    signals::Signals,
    units,
};
use anyhow::{Context, bail};
use cache::{Cache, OriginId};
use claims::Claims;
use follower::Following;
use origin::Origin;
use serde_json::json;
use status::{OriginStatus, RelaySubject};
use std::{
    io::IsTerminal,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};
use tensor_relay_client::{Config, Glob, ReaderName, RelayId, Relaying, Ticket, Topic};
use tensor_relay_device::HostMemory;
use tensor_relay_server::{Access, Identity, Relay, RelayOptions, Server};
use tokio::task::JoinSet;

/// The time for which a lost origin is awaited without giving up what was received of a version: for as long as the process
/// runs.
const FOR_EVER: Duration = Duration::from_secs(10 * 365 * 24 * 3_600);

/// The most snapshots that may be in use: their memory is bounded, and not their number.
const VERSIONS_HELD_MAX: usize = 1 << 20;

pub(crate) async fn run(args: RelayArgs) -> anyhow::Result<Exit> {
    output::queue_from_now_on(args.json)?;
    check(&args)?;
    let tickets = args.origins.read()?;
    let admin = BoundPort::new(&args.server.admin, true)?;
    let mut signals = Signals::listen()?;
    orphans::reap_from_now_on()?;
    let state_dir = state_dir_or_default(args.server.state_dir.as_deref())?;
    let identity = Identity::load_or_create(&state_dir);
    let identity = identity.context("cannot use the state directory; choose another one with --state-dir")?;
    let id = RelayId::of_key(identity.fingerprint().0);
    let listener = listening::open(&args.server, &identity)?;
    let access = admission::access(args.server.open, &state_dir)?;
    let config = args.server.config().for_container(args.server.encoded_mem);
    let (reserved, memory_bytes_max) = (config.reserve()?, config.memory_bytes_max());
    let server = Server::start(listener, access.clone(), config).with_reservation(Some(reserved));
    let relay = server.relay(RelayOptions {
        id,
        topics: args.server.topic_options(),
        every: args.mode == ModeArg::Every,
    });
    let cache = args.cache_dir.as_deref().map(|dir| {
        Cache::open(dir, args.cache_bytes.unwrap_or(u64::MAX), args.server.keep_versions as usize)
    });
    let cache = cache.transpose()?.map(Arc::new);
    let topics: Vec<Vec<Glob>> = tickets.iter().map(|ticket| topics_of(&args, ticket)).collect();
    let statuses: Vec<_> = tickets.iter().map(|ticket| OriginStatus::new(ticket.addresses())).collect();
    let subject = RelaySubject::new(
        server.status_reader(),
        literal(&topics),
        statuses.clone(),
        cache.clone(),
        args.ready_within,
    );
    let admin_address = admin.as_ref().and_then(BoundPort::address);
    let _admin_port = admin.map(|admin| admin.serve(subject)).transpose()?;
    let ticket_file = offer(&args, &state_dir, (&server, &access, &identity), &literal(&topics))?;
    if args.json {
        print_object(json!({
            "event": "relaying",
            "listen": server.network_address(),
            "socket": server.socket_path(),
            "key": identity.fingerprint().to_string(),
            "ticket_file": ticket_file,
            "admin": admin_address,
            "memory_bytes_max": memory_bytes_max,
            "origins": tickets.iter().map(Ticket::addresses).collect::<Vec<_>>(),
            "topics": literal(&topics).iter().map(|topic| json!({ "topic": topic.as_str() })).collect::<Vec<_>>(),
        }));
    } else if let Some(admin) = admin_address {
        crate::log::message!("status page: {}", page_url(admin));
    }
    let hub = open_hub(&args, (&server, &access, &identity)).await?;
    let memory = HostMemory::new(args.mem.unwrap_or(u64::MAX));
    let memory = if server.socket_path().is_some() { memory.shareable() } else { memory };
    let mut origins = JoinSet::new();
    let (claims, relaying) = (Arc::<Claims>::default(), relay.clone());
    let ids = tickets.iter().map(OriginId::of).collect();
    let beginning = async {
        let restored = match &cache {
            Some(cache) => cache::restore(cache, &memory, &relaying).await,
            None => vec![],
        };
        let following =
            Arc::new(Following::new(restored, claims, relaying, cache.clone(), ids, (&args, id))?);
        for (number, ((ticket, topics), status)) in tickets.into_iter().zip(topics).zip(statuses).enumerate()
        {
            let following = Arc::clone(&following);
            let (config, sharing) = client_config(&args, (&server, &relay, id), (&following, number))?;
            let origin = Origin {
                number,
                ticket,
                topics,
                config,
                sharing,
                status,
                following,
                connect_timeout: args.origins.connection.connect_timeout,
            };
            origins.spawn(origin.run());
        }
        anyhow::Ok(())
    };
    tokio::select! {
        begun = beginning => begun?,
        exit = signals.next() => return Ok(exit),
    }
    let exit = tokio::select! {
        exit = signals.next() => exit,
        () = answer(hub) => unreachable!("a hub answers until it is dropped"),
        Some(ended) = origins.join_next() => match ended {
            Ok(never) => match never {},
            Err(panic) => std::panic::resume_unwind(panic.into_panic()),
        },
    };
    let sent = server.sent_reader();
    let drained = drain(server, args.server.grace, &mut signals).await;
    origins.shutdown().await;
    report_sent(sent(), args.json);
    Ok(drained.unwrap_or(exit))
}

/// Opens the hub, which is a client of this relay, and prints how it is used.
async fn open_hub(
    args: &RelayArgs,
    (server, access, identity): (&Server, &Access, &Identity),
) -> anyhow::Result<Option<Hub>> {
    let Some(address) = args.hub else { return Ok(None) };
    let own = match (server.network_address(), server.socket_path()) {
        (None, Some(path)) => format!("unix:{}", path.display()),
        (network, _) => loopback(network.context("the relay listens nowhere")?).to_string(),
    };
    let ticket = admission::ticket(access, &[own], identity.fingerprint(), None)?;
    let client = (vec![ticket], Config::default(), args.origins.connection.connect_timeout);
    let hub = Hub::open(address, &args.hub_options, client).await?;
    hub.report(args.json).await?;
    Ok(Some(hub))
}

/// How this process reaches its own port.
fn loopback(mut bound: SocketAddr) -> SocketAddr {
    match bound.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => bound.set_ip(Ipv4Addr::LOCALHOST.into()),
        IpAddr::V6(ip) if ip.is_unspecified() => bound.set_ip(Ipv6Addr::LOCALHOST.into()),
        _ => {}
    }
    bound
}

/// Answers the requests of a hub, if there is one; never returns.
async fn answer(hub: Option<Hub>) {
    match hub {
        Some(hub) => hub.run().await,
        None => std::future::pending().await,
    }
}

/// Refuses what clap cannot.
fn check(args: &RelayArgs) -> Result<(), UsageError> {
    let refuse = |why: &str| Err(UsageError(why.into()));
    match (&args.reader, args.mode) {
        _ if args.server.listen == ListenArg::Nowhere && args.server.socket.socket.is_none() => {
            refuse("--listen none requires --socket PATH")
        }
        (Some(_), ModeArg::Latest) => refuse("--reader requires --mode every"),
        _ => Ok(()),
    }
}

/// The topics that are taken from the server of `ticket`.
fn topics_of(args: &RelayArgs, ticket: &Ticket) -> Vec<Glob> {
    let own = ticket.topic().map_or("**", Topic::as_str);
    match &args.topic[..] {
        [] => Glob::new(own).into_iter().collect(), // A topic's name is a glob.
        given => given.to_vec(),
    }
}

/// The topics that are named, if all are.
fn literal(topics: &[Vec<Glob>]) -> Vec<Topic> {
    let all = || topics.iter().flatten();
    let mut named: Vec<Topic> = match all().all(Glob::is_literal) {
        true => all().filter_map(|glob| Topic::new(glob.as_str()).ok()).collect(),
        false => vec![],
    };
    named.sort();
    named.dedup();
    named
}

/// Writes the relay's own tickets, one for each named topic and one for all, and prints them; returns their file.
fn offer(
    args: &RelayArgs,
    state_dir: &std::path::Path,
    (server, access, identity): (&Server, &Access, &Identity),
    topics: &[Topic],
) -> anyhow::Result<std::path::PathBuf> {
    let listening = Listening::of(server);
    let addresses = listening.advertised(&args.server.advertise);
    let topics = topics.iter().map(Some).chain((topics.len() != 1).then_some(None));
    let tickets = topics.map(|topic| admission::ticket(access, &addresses, identity.fingerprint(), topic));
    let tickets = tickets
        .map(|ticket| Ok(ticket?.to_string()))
        .collect::<anyhow::Result<Vec<_>>>()?;
    let ticket_file = admission::ticket_file(args.server.ticket_file.as_deref(), state_dir);
    admission::write_tickets(&ticket_file, &tickets)?;
    admission::keep_addresses(&ticket_file, state_dir, &tickets);
    if !args.json {
        crate::log::message!(
            "relaying on {listening}; consumers run: tensor-relay subscribe TICKET_FILE --out DIR"
        );
        crate::log::message!("the tickets are in {}", ticket_file.display());
        // They contain tokens: if stdout is not a terminal, it may be a log that others can read.
        let shown = match args.server.open || std::io::stdout().is_terminal() {
            true => tickets.join("\n"),
            false => ticket_file.display().to_string(),
        };
        let _ = output::line(&shown); // The relay continues if stdout is closed.
    }
    Ok(ticket_file)
}

/// The configuration of the client of the origin with this number, and what it shares with the origin's other clients.
fn client_config(
    args: &RelayArgs,
    (server, relay, id): (&Server, &Relay, RelayId),
    (following, number): (&Arc<Following>, usize),
) -> anyhow::Result<(Config, Sharing)> {
    let sharing =
        Sharing::open(&SharingOptions { host: None, swarm: args.swarm.options(), memory_bytes: args.mem })?;
    let config = sharing.configure(Config {
        identity: args.origins.connection.identity.load()?,
        memory_bytes: args.mem.unwrap_or(u64::MAX),
        base_bytes: args.server.base_mem,
        lanes: args.lanes,
        transport: args.origin_transport,
        topic_timeout: FOR_EVER,
        reconnect_timeout: FOR_EVER,
        versions_held_max: VERSIONS_HELD_MAX,
        ..Config::default()
    });
    let peers = config.sharing.as_ref().and_then(|sharing| sharing.forward.clone());
    let following = Arc::clone(following);
    let forward = relay.forward_of(peers, move |topic| following.may_refuse(topic, number));
    Ok((
        Config { shareable: server.socket_path().is_some(), relay: Some(Relaying { id, forward }), ..config },
        sharing,
    ))
}

/// The name under which origins keep the relay's place.
fn reader_name(args: &RelayArgs, id: RelayId) -> anyhow::Result<ReaderName> {
    if let Some(name) = &args.reader {
        return Ok(name.clone());
    }
    let own: String = id.0.iter().map(|byte| format!("{byte:02x}")).collect();
    match ReaderName::new(&format!("relay-{own}")) {
        Ok(name) => Ok(name),
        Err(error) => bail!("internal error: {error}"),
    }
}

/// A version, for people.
fn described(id: &tensor_relay_client::VersionId, payload_bytes: u64, took: Duration) -> String {
    format!("{id}: {}, {}", units::bytes(payload_bytes), units::rate(payload_bytes, took))
}
