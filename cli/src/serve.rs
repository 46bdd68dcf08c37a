//! `tensor-relay serve`: files as topics.

use crate::{address, args::ServeArgs, signals::Signals, units};
use anyhow::{Context, bail};
use serde::Serialize;
use std::{
    collections::HashSet,
    io::Write,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::ExitCode,
    time::{Duration, Instant},
};
use tensor_relay_server::{
    Config, Epoch, Fingerprint, Identity, Listener, Server, Staged, Ticket, Topic, TopicOptions, Tuning,
    VersionId,
};

/// The one line of `--json`.
#[derive(Debug, Serialize)]
struct Serving<'a> {
    event: &'static str,
    listen: SocketAddr,
    key: String,
    topics: &'a [Served],
}

/// One topic that is on offer.
#[derive(Debug, Serialize)]
struct Served {
    topic: String,
    epoch: String,
    version: u64,
    tensors: usize,
    payload_bytes: u64,
    file: PathBuf,
    ticket: String,
}

pub(crate) async fn run(args: ServeArgs) -> anyhow::Result<ExitCode> {
    refuse_duplicates(&args)?;
    let mut signals = Signals::hear()?;
    let identity = Identity::load_or_create(&state_dir(args.state_dir.as_deref())?)?;
    let listener = Listener::bind(args.listen, &identity, Tuning::default())?;
    let config = Config { codec: args.codec.into(), chunk_bytes: args.chunk_size, ..Config::default() };
    let server = Server::start(listener, config);
    let listening = server.local_address()?;
    let addresses = advertised(&args, listening);
    let mut topics = Vec::new();
    for (topic, file) in &args.topics {
        let publishing = publish_file(&server, topic, file);
        let (id, tensors, payload_bytes) = tokio::select! {
            published = publishing => published?,
            exit = signals.next() => return Ok(exit.into()),
        };
        let ticket = Ticket::new(addresses.clone(), vec![identity.fingerprint().0], Some(topic.clone()))
            .context("cannot make a ticket; check --advertise")?;
        topics.push(Served {
            topic: topic.to_string(),
            epoch: id.epoch.to_string(),
            version: id.version.0,
            tensors,
            payload_bytes,
            file: file.clone(),
            ticket: ticket.to_string(),
        });
    }
    if let Some(path) = &args.ticket_file {
        write_tickets(path, &topics)
            .with_context(|| format!("cannot write the ticket file {}", path.display()))?;
    }
    report(&args, listening, identity.fingerprint(), &topics);
    let exit = signals.next().await;
    drain(server, args.grace, &mut signals)
        .await
        .map_or_else(|| Ok(exit.into()), Ok)
}

fn refuse_duplicates(args: &ServeArgs) -> anyhow::Result<()> {
    let mut seen = HashSet::new();
    match args.topics.iter().find(|(topic, _)| !seen.insert(topic)) {
        Some((topic, _)) => bail!(crate::exit::UsageError(format!("--topic {topic}=… is given twice"))),
        None => Ok(()),
    }
}

/// Where the key is kept when nothing is said: where the XDG specification puts state.
pub(crate) fn state_dir(given: Option<&Path>) -> anyhow::Result<PathBuf> {
    let from_env = |name| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    given
        .map(PathBuf::from)
        .or_else(|| from_env("XDG_STATE_HOME").map(|dir| dir.join("tensor-relay")))
        .or_else(|| from_env("HOME").map(|home| home.join(".local/state/tensor-relay")))
        .context("there is no home directory to keep the server's key in: give --state-dir")
}

fn advertised(args: &ServeArgs, listening: SocketAddr) -> Vec<String> {
    if !args.advertise.is_empty() {
        return args.advertise.iter().map(|host| host.with_port(listening.port())).collect();
    }
    let (address, guessed) = address::reachable(listening);
    if guessed {
        eprintln!(
            "advertising {address}, this machine's address on its default route; --advertise names another"
        );
    }
    vec![address.to_string()]
}

/// Stages a file off the executor and publishes it. The epoch follows from the content, so a server that is restarted
/// with the same file offers the same version.
async fn publish_file(
    server: &Server,
    topic: &Topic,
    file: &Path,
) -> anyhow::Result<(VersionId, usize, u64)> {
    let (staging, path) = (server.staging(), file.to_owned());
    let began = Instant::now();
    let staged = tokio::task::spawn_blocking(move || Staged::from_safetensors(&path, &staging)).await??;
    let (tensors, payload_bytes) = (staged.manifest().tensors().len(), staged.manifest().payload_bytes());
    let digest = staged.digest().0;
    let epoch = Epoch(u64::from_le_bytes([
        digest[0], digest[1], digest[2], digest[3], digest[4], digest[5], digest[6], digest[7],
    ]));
    let mut publisher = server.publisher_with(topic.clone(), Some(epoch), TopicOptions::default())?;
    let publication = publisher.publish(staged, vec![]).await?;
    eprintln!(
        "{topic}: {tensors} tensors, {} from {} in {}",
        units::bytes(payload_bytes),
        file.display(),
        units::time(began.elapsed()),
    );
    Ok((publication.id().clone(), tensors, payload_bytes))
}

/// A ticket lets its holder in, so the file is its owner's alone, whatever it was before. It is replaced in one step.
fn write_tickets(path: &Path, topics: &[Served]) -> std::io::Result<()> {
    let folder = path
        .parent()
        .filter(|p| !p.as_os_str().is_empty())
        .unwrap_or_else(|| Path::new("."));
    let mut file = tempfile::NamedTempFile::new_in(folder)?; // Private from the start.
    topics.iter().try_for_each(|served| writeln!(file, "{}", served.ticket))?;
    file.as_file().sync_all()?;
    file.persist(path).map(|_| ()).map_err(|failed| failed.error)
}

fn report(args: &ServeArgs, listen: SocketAddr, key: Fingerprint, topics: &[Served]) {
    let mut out = std::io::stdout().lock();
    // Whoever started the server may have closed stdout; it serves all the same.
    let _ = match args.json {
        true => {
            let serving = Serving { event: "serving", listen, key: key.to_string(), topics };
            serde_json::to_writer(&mut out, &serving)
                .map_err(Into::into)
                .and_then(|()| writeln!(out))
        }
        false => {
            eprintln!(
                "serving on UDP {listen}; on each consumer run: tensor-relay subscribe 'TICKET' --out DIR"
            );
            topics.iter().try_for_each(|served| writeln!(out, "{}", served.ticket))
        }
    };
    let _ = out.flush();
}

/// Finishes what is under way, within `grace`; a second signal ends it at once. Returns the exit code of an orderly end.
async fn drain(server: Server, grace: Duration, signals: &mut Signals) -> Option<ExitCode> {
    if server.stats().transfers > 0 {
        eprintln!("finishing {} transfers, for at most {}", server.stats().transfers, units::time(grace));
    }
    tokio::select! {
        finished = server.shutdown(grace) => {
            if !finished {
                eprintln!("warning: transfers were cut off after {}; their subscribers keep nothing half", units::time(grace));
            }
            Some(ExitCode::SUCCESS)
        }
        _ = signals.next() => None,
    }
}
