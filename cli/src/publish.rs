//! `tensor-relay publish`: publishes files as a version through a server on the same machine.

use crate::{
    args::PublishArgs,
    engine_caches::SentCaches,
    exit::Exit,
    offered,
    output::{print_json, print_line},
    units,
};
use anyhow::Context;
use serde_json::json;
use std::time::{Duration, Instant};
use tensor_relay_server::{
    TensorFiles,
    sidecar::{Producer, Publication, SealedVersion, Terms},
};

/// An expired deadline of `--timeout`.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WaitTimeout {
    #[error(
        "the version was not published within {0:?}, because subscribers in mode `every` have not acknowledged older \
         versions. It was withdrawn; wait longer with --timeout"
    )]
    Published(Duration),
    #[error("{found} of {wanted} subscribers have {version} after {waited:?}; it stays on offer")]
    Committed { version: String, found: u64, wanted: u64, waited: Duration },
    #[error(
        "the memory of {version} is still in use after {waited:?}: it is released when a newer version has replaced it \
         and all transfers of it have ended"
    )]
    Released { version: String, waited: Duration },
}

pub(crate) async fn run(args: PublishArgs) -> anyhow::Result<Exit> {
    let began = Instant::now();
    let producer = Producer::connect_to(&args.socket, args.connect_timeout, args.server_uid).await?;
    let caches = SentCaches::new(&args.caches).await?;
    let version = seal(&args, caches, producer.terms().clone()).await?;
    let tensors = version.manifest().tensors().len();
    let publish = producer.publish(args.topic.clone(), version, args.metadata.clone());
    let published = tokio::time::timeout(args.timeout, publish).await;
    let mut publication = published.map_err(|_| WaitTimeout::Published(args.timeout))??;
    report(&args, &publication, tensors, began.elapsed());
    if let Some(wanted) = args.wait_committed {
        wait_committed(&args, &mut publication, wanted).await?;
    }
    if args.wait_released {
        wait_released(&args, &mut publication).await?;
    }
    Ok(Exit::Done)
}

/// Copies the files into memory that the server can read, on a blocking thread.
async fn seal(args: &PublishArgs, caches: SentCaches, terms: Terms) -> anyhow::Result<SealedVersion> {
    let (path, rules, splits) = (args.file.clone(), args.folder.into(), args.split.splits());
    let sealed = tokio::task::spawn_blocking(move || -> anyhow::Result<_> {
        let files = caches.add_to(TensorFiles::open_with(&path, rules)?.split(&splits)?)?;
        let version = files
            .seal(&terms)
            .with_context(|| format!("cannot publish {}", path.display()))?;
        Ok((version, offered::messages(&files)))
    });
    let (version, messages) = sealed.await??;
    messages.iter().for_each(|message| crate::log::message!("{message}"));
    Ok(version)
}

fn report(args: &PublishArgs, publication: &Publication, tensors: usize, took: Duration) {
    let (id, path, reason) = (publication.id(), publication.path(), publication.reason());
    let (payload_bytes, copied_bytes) = (publication.payload_bytes(), publication.copied_bytes());
    crate::log::message!(
        "{id}: {}, {}, published in {} through {path} ({reason}); {} copied",
        units::count(tensors, "tensor"),
        units::bytes(payload_bytes),
        units::time(took),
        units::bytes(copied_bytes),
    );
    match args.json {
        true => print_json(&json!({
            "event": "published",
            "topic": id.topic.as_str(),
            "epoch": id.epoch.to_string(),
            "version": id.version.0,
            "tensors": tensors,
            "payload_bytes": payload_bytes,
            "copied_bytes": copied_bytes,
            "path": path.name(),
            "reason": reason,
            "duration_s": took.as_secs_f64(),
        })),
        false => print_line(&id.to_string()),
    }
}

async fn wait_committed(
    args: &PublishArgs,
    publication: &mut Publication,
    wanted: u64,
) -> anyhow::Result<()> {
    let reached = publication.committed(wanted, args.timeout).await?;
    let (found, version) = (publication.committed_count(), publication.id().to_string());
    if !reached && publication.has_ended() {
        anyhow::bail!(
            "{found} of {wanted} subscribers have {version}, and no further one can receive it: the version was \
             replaced or withdrawn"
        );
    }
    if !reached {
        return Err(WaitTimeout::Committed { version, found, wanted, waited: args.timeout }.into());
    }
    report_event(args, publication, "committed");
    Ok(())
}

async fn wait_released(args: &PublishArgs, publication: &mut Publication) -> anyhow::Result<()> {
    if !publication.released(args.timeout).await? {
        let version = publication.id().to_string();
        return Err(WaitTimeout::Released { version, waited: args.timeout }.into());
    }
    report_event(args, publication, "released");
    Ok(())
}

fn report_event(args: &PublishArgs, publication: &Publication, event: &str) {
    let (id, committed) = (publication.id(), publication.committed_count());
    crate::log::message!("{id}: {event}; received by {}", units::count(committed as usize, "subscriber"));
    if args.json {
        print_json(&json!({
            "event": event,
            "topic": id.topic.as_str(),
            "epoch": id.epoch.to_string(),
            "version": id.version.0,
            "committed": committed,
        }));
    }
}
