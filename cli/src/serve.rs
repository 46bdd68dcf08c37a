//! `tensor-relay serve`: serves files as topics.

pub(crate) mod admission;
mod ledger;
pub(crate) mod listening;
mod load;
mod maintenance;
mod offer;
mod publish_socket;

use crate::{
    admin::{BoundPort, DeviceMemory, ServerSubject, page_url},
    args::{DeviceName, HoldArg, ListenArg, ServeArgs},
    codecs, device,
    engine_caches::SentCaches,
    exit::{Exit, UsageError},
    orphans, output,
    signals::Signals,
    units,
};
use anyhow::Context;
use ledger::Ledger;
pub(crate) use listening::Listening;
pub(crate) use listening::open_socket;
use load::Loader;
use maintenance::{all_lost, maintain};
use offer::{Offer, Published};
use serde_json::{Value, json};
use std::{
    collections::HashSet,
    io::{ErrorKind, IsTerminal},
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};
use tensor_relay_client::check_replaceable;
use tensor_relay_server::{BaseStats, CodecStats, Config, Identity, Server, ServerStats, Topic, VersionId};

pub(crate) async fn run(args: ServeArgs) -> anyhow::Result<Exit> {
    output::queue_from_now_on(args.json)?;
    tokio::spawn(report_closed_stdout());
    check(&args)?;
    let admin = BoundPort::new(&args.server.admin, true)?;
    let caches = SentCaches::new(&args.caches).await?; // A child process: before children are reaped.
    let mut signals = Signals::listen()?;
    orphans::reap_from_now_on()?;
    let device = tokio::select! {
        opened = device::open(&args.device, args.chunk_size) => opened?,
        exit = signals.next() => return Ok(exit),
    };
    let state_dir = state_dir_or_default(args.server.state_dir.as_deref())?;
    let identity = Identity::load_or_create(&state_dir);
    let identity = identity.context("cannot use the state directory; choose another one with --state-dir")?;
    let ledger = args.watch.then(|| Ledger::open(&state_dir)).transpose()?;
    let ledger = ledger.map(Arc::new);
    let listener = listening::open(&args.server, &identity)?;
    let access = admission::access(args.server.open, &state_dir)?;
    let config = server_config(&args);
    let (reserved, memory_bytes_max) = (config.reserve()?, config.memory_bytes_max());
    let server = Server::start(listener, access.clone(), config).with_reservation(Some(reserved));
    let listening = Listening::of(&server);
    let admin_address = admin.as_ref().and_then(BoundPort::address);
    let subject = || ServerSubject {
        reader: server.status_reader(),
        topics: args.topics.iter().map(|(topic, _)| topic.clone()).collect(),
        device: DeviceMemory::of(device.as_ref()),
    };
    let _admin_port = admin.map(|admin| admin.serve(subject())).transpose()?;
    let addresses = listening.advertised(&args.server.advertise);
    let limit_hint = args.device.limit_hint();
    let rules = args.folder.into();
    let (staging, splits) = (server.staging(), args.split.splits());
    let loader = Loader { staging, hold: args.hold, rules, splits, caches, device, limit_hint };
    let beginning = begin_offers(&server, &args, &loader, ledger.as_ref());
    let begun = tokio::select! {
        begun = beginning => begun?,
        exit = signals.next() => return Ok(exit),
    };
    let (mut topics, mut offers, mut tickets) = (Vec::new(), Vec::new(), Vec::new());
    for ((topic, path), (offer, published)) in args.topics.iter().zip(begun) {
        tickets
            .push(admission::ticket(&access, &addresses, identity.fingerprint(), Some(topic))?.to_string());
        let mut served = version_object(&published.id, published.tensors, published.payload_bytes);
        (served["file"], served["files"]) = (json!(path), json!(published.files));
        topics.push(served);
        offers.push(offer);
    }
    if args.publish_socket.is_some() || topics.len() > 1 {
        // The last ticket is for all topics: for subscribers of several topics, and for topics that will be published
        // through the socket.
        tickets.push(admission::ticket(&access, &addresses, identity.fingerprint(), None)?.to_string());
    }
    let ticket_file = admission::ticket_file(args.server.ticket_file.as_deref(), &state_dir);
    admission::write_tickets(&ticket_file, &tickets)?;
    admission::keep_addresses(&ticket_file, &state_dir, &tickets);
    let publish_socket = publish_socket::open(&server, &args, loader.device.as_ref())?;
    match args.json {
        true => print_object(json!({
            "event": "serving",
            "listen": listening.network,
            "socket": listening.socket,
            "key": identity.fingerprint().to_string(),
            "device": args.device.device.to_string(),
            // The tickets are secrets, so they are not in the output, which may be a log.
            "ticket_file": ticket_file,
            "publish_socket": args.publish_socket,
            "admin": admin_address,
            "memory_bytes_max": memory_bytes_max,
            "topics": topics,
        })),
        false => {
            report_start(&args, (&listening, admin_address), memory_bytes_max, (&tickets, &ticket_file));
        }
    }
    let mut maintaining = maintain(offers, args.watch_interval, args.json);
    let ended = tokio::select! {
        exit = signals.next() => Ok(exit),
        failure = device::failure(loader.device.as_ref()) => Err(failure),
        error = all_lost(&mut maintaining), if publish_socket.is_none() => Err(error),
    };
    let (sent, stats) = (server.sent_reader(), server.stats());
    drop((maintaining, publish_socket));
    let drained = drain(server, args.server.grace, &mut signals).await;
    report_sent(sent(), args.json);
    report_memory(&stats, args.json);
    ended.map(|exit| drained.unwrap_or(exit))
}

/// Loads the files of all topics one after the other, and publishes them together: the ledger records those of a start
/// in a few writes, however many they are.
async fn begin_offers(
    server: &Server,
    args: &ServeArgs,
    loader: &Loader,
    ledger: Option<&Arc<Ledger>>,
) -> anyhow::Result<Vec<(Offer, Published)>> {
    let mut loaded = Vec::new();
    for (topic, path) in &args.topics {
        loaded.push(Offer::load(server, args, loader, (topic, path), ledger).await?);
    }
    let publishing: Vec<_> = loaded.into_iter().map(|offer| tokio::spawn(offer.publish())).collect();
    let mut begun = Vec::new();
    for published in publishing {
        begun.push(published.await??);
    }
    Ok(begun)
}

/// The configuration of a server with these options, adapted to the memory limit of the container.
pub(crate) fn server_config(args: &ServeArgs) -> Config {
    Config {
        codec: args.codec.into(),
        chunk_bytes: args.chunk_size,
        staged_bytes: args.staged_mem.unwrap_or(u64::MAX),
        ..args.server.config()
    }
    .for_container(args.server.encoded_mem)
}

/// A version in the events of `--json`.
fn version_object(id: &VersionId, tensors: usize, payload_bytes: u64) -> Value {
    json!({
        "topic": id.topic.as_str(),
        "epoch": id.epoch.to_string(),
        "version": id.version.0,
        "tensors": tensors,
        "payload_bytes": payload_bytes,
    })
}

fn report_published(Published { id, tensors, payload_bytes, files, missed }: &Published, as_json: bool) {
    let missing = match missed {
        0 => String::new(),
        _ => format!("; before it, {} never published", units::missed_generations(*missed)),
    };
    crate::log::message!(
        "{id}: {}, {}{missing}",
        units::count(*tensors, "tensor"),
        units::bytes(*payload_bytes)
    );
    if as_json {
        let mut line = version_object(id, *tensors, *payload_bytes);
        (line["event"], line["files"], line["missed_generations"]) =
            ("published".into(), json!(files), (*missed).into());
        print_object(line);
    }
}

/// Warns when stdout cannot be written, unless its reader closed it.
async fn report_closed_stdout() {
    let closed = output::failed().await;
    if !closed.is_expected() {
        crate::log::message!("warning: {closed}; events are lost");
    }
}

/// Prints an object on stdout, without fields that are null. The server continues if stdout is closed.
pub(crate) fn print_object(mut object: Value) {
    object
        .as_object_mut()
        .into_iter()
        .for_each(|fields| fields.retain(|_, value| !value.is_null()));
    let _ = output::line(&object.to_string());
}

/// Reports the host memory for versions before the server drained, by use.
fn report_memory(stats: &ServerStats, as_json: bool) {
    let ServerStats { staged_bytes, reusable_bytes, bases: BaseStats { versions, bytes }, .. } = *stats;
    let encoded_bytes = stats.encoder.encoded_bytes;
    if versions > 0 {
        let (versions, bytes) = (units::count(versions as usize, "version"), units::bytes(bytes));
        crate::log::message!("retained {versions} as bases of deltas: {bytes}");
    }
    crate::log::message!(
        "memory: {} staged, {} cached for later versions, {} of encoded chunks",
        units::bytes(staged_bytes),
        units::bytes(reusable_bytes),
        units::bytes(encoded_bytes)
    );
    if as_json {
        print_object(json!({ "event": "bases", "versions": versions, "bytes": bytes }));
        print_object(json!({
            "event": "memory",
            "staged_bytes": staged_bytes,
            "base_bytes": bytes,
            "reusable_bytes": reusable_bytes,
            "encoded_bytes": encoded_bytes,
        }));
    }
}

/// Reports the payload sent for each topic, and its encoded size.
pub(crate) fn report_sent(topics: Vec<(Topic, CodecStats)>, as_json: bool) {
    for (topic, codecs) in topics {
        let total = codecs.total();
        if total.chunks == 0 {
            continue;
        }
        let encoded = codecs::as_text(&codecs)
            .map(|encoded| format!(", {encoded}"))
            .unwrap_or_default();
        crate::log::message!("sent {topic}: {}{encoded}", units::bytes(total.raw_bytes));
        if as_json {
            print_object(json!({
                "event": "sent",
                "topic": topic.as_str(),
                "chunks": total.chunks,
                "payload_bytes": total.raw_bytes,
                "wire_bytes": total.wire_bytes,
                "codecs": codecs::as_object(&codecs, "encode_s"),
            }));
        }
    }
}

/// Refuses what clap cannot, before files are read: nothing to serve, options without effect, and contradictions.
fn check(args: &ServeArgs) -> Result<(), UsageError> {
    const REMEDY: &str = "without --ticket-file, the tickets are written to a file in the state directory";
    let refuse = |why: &str| Err(UsageError(why.into()));
    if args.publish_socket.is_none() {
        match (args.publish_uid.is_empty(), args.expire_after) {
            _ if args.topics.is_empty() => refuse(
                "there is nothing to serve: name files with --topic NAME=PATH, or let other processes publish with \
                 --publish-socket PATH",
            )?,
            (false, _) => refuse("--publish-uid requires --publish-socket PATH")?,
            (_, Some(_)) => refuse("--expire-after requires --publish-socket PATH")?,
            _ => {}
        }
    }
    if args.server.listen == ListenArg::Nowhere && args.server.socket.socket.is_none() {
        refuse("--listen none requires --socket PATH")?;
    }
    let mut topics = HashSet::new();
    if let Some((topic, _)) = args.topics.iter().find(|(topic, _)| !topics.insert(topic)) {
        return refuse(&format!("--topic {topic}=… is given twice"));
    }
    if let (HoldArg::Borrow, device @ DeviceName::Cuda(_)) = (args.hold, args.device.device) {
        return refuse(&format!(
            "--hold borrow leaves tensors in their files, and --device {device} puts them into the GPU's memory: only \
             one of the two is possible; without --hold borrow, the files are read once and uploaded"
        ));
    }
    if args.server.socket.share_gpu && args.device.device == DeviceName::Cpu {
        return refuse(
            "--share-gpu shares versions on a GPU, and without --device they are in host memory, which processes of this \
             host share in any case: add --device cuda:N, or omit --share-gpu",
        );
    }
    let Some(path) = &args.server.ticket_file else { return Ok(()) };
    match check_replaceable(path) {
        _ if path == Path::new("-") => {
            refuse(&format!("--ticket-file requires the name of a file, not `-`; {REMEDY}"))
        }
        // A device or a FIFO, which a rename must not replace.
        Err(error) if error.kind() == ErrorKind::InvalidInput => {
            refuse(&format!("--ticket-file {}: {error}; {REMEDY}", path.display()))
        }
        _ => Ok(()), // Writing the file reports other errors.
    }
}

/// The state directory: `given`, or the default one.
pub(crate) fn state_dir_or_default(given: Option<&Path>) -> anyhow::Result<PathBuf> {
    given
        .map(PathBuf::from)
        .or_else(Identity::default_dir)
        .context("there is no home directory to keep the server's key in: give --state-dir")
}

/// Reports as text that the server has started. It uses at most `memory_bytes_max` of host memory in addition to its
/// versions.
fn report_start(
    args: &ServeArgs,
    (listening, admin): (&Listening, Option<SocketAddr>),
    memory_bytes_max: u64,
    (tickets, ticket_file): (&[String], &Path),
) {
    let from = match args.device.device {
        DeviceName::Cpu => String::new(),
        cuda => format!(" from {cuda}"),
    };
    crate::log::message!(
        "serving{from} on {listening}; give a ticket to each consumer, and run there: tensor-relay subscribe TICKET_FILE \
         --out DIR"
    );
    crate::log::message!("the tickets are in {}", ticket_file.display());
    if let Some(socket) = &args.publish_socket {
        crate::log::message!(
            "to publish, run here: tensor-relay publish {} TOPIC FILE; consumers name the topic with --topic",
            socket.display()
        );
    }
    crate::log::message!(
        "memory: at most {} in addition to versions; `tensor-relay config serve` lists the bounds",
        units::bytes(memory_bytes_max)
    );
    if let Some(admin) = admin {
        crate::log::message!("status page: {}", page_url(admin));
    }
    // The tickets contain tokens, except with --open. If stdout is not a terminal, it may be a log that others can read.
    let shown = match args.server.open || std::io::stdout().is_terminal() {
        true => tickets.join("\n"),
        false => ticket_file.display().to_string(),
    };
    let _ = output::line(&shown); // The server continues if stdout is closed.
}

/// Finishes the transfers in progress, within `grace`. Returns `None` if a second signal interrupts it.
pub(crate) async fn drain(server: Server, grace: Duration, signals: &mut Signals) -> Option<Exit> {
    let transfers = server.stats().transfers;
    if transfers > 0 {
        let transfers = units::count(transfers as usize, "transfer");
        crate::log::message!("finishing {transfers}, for at most {}", units::time(grace));
    }
    tokio::select! {
        finished = server.shutdown(grace) => {
            if !finished {
                crate::log::message!(
                    "warning: transfers were cut off after {}; their subscribers keep no incomplete version",
                    units::time(grace)
                );
            }
            Some(Exit::Done)
        }
        _ = signals.next() => None,
    }
}
