//! `tensor_relay.connect`: connects to a server.

use crate::{
    admin,
    client::Client,
    errors::{Kind, of_client},
    gpu::{GpuOptions, Gpus, parse_device},
    range::{at_least, one_of, positive_seconds, within},
    runtime,
    serve::{addresses_of, no_address, parse_transport},
    wait::{finite_seconds, seconds, wait},
};
use pyo3::prelude::*;
use std::{
    path::{Path, PathBuf},
    sync::{Arc, LazyLock},
};
use tensor_relay_cli::{
    AdminPort, Consumer, HostOptions, OfferOptions, Sharing, SharingOptions, SwarmOptions,
};
use tensor_relay_client::{self as client, Config, Identity, LANES_MAX, Lanes, Site, Ticket};

/// The length of a GPU's slots: the default size of chunks. A longer chunk is copied once more.
const CHUNK_BYTES: u32 = 4 << 20;

/// The consumer as which publishers count the commits of this process' clients, unless a client counts alone.
static THIS_PROCESS: LazyLock<[u8; 16]> = LazyLock::new(|| Config::default().consumer);

/// Connects to a server. `tensor_relay.connect` documents the options.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "keywords, each with its name where it is called")]
pub(crate) fn connect(
    py: Python<'_>,
    ticket: &str,
    timeout: f64,
    memory_bytes: Option<u64>,
    base_bytes: u64,
    lanes: Option<u32>,
    topic_timeout: f64,
    stall_timeout: f64,
    reconnect_timeout: f64,
    versions_held_max: usize,
    hold_timeout: f64,
    transport: &str,
    identity: Option<PathBuf>,
    certificate: Option<PathBuf>,
    device: &str,
    gpu_memory_bytes: Option<u64>,
    pinned_bytes: u64,
    admin: Option<&str>,
    admin_token_file: Option<PathBuf>,
    ready_within: Option<f64>,
    consumer: &str,
    sources: Vec<String>,
    share: Bound<'_, PyAny>,
    share_listen: &str,
    share_rate: Option<u64>,
    share_mem: Option<u64>,
    site: &str,
    share_host: Option<PathBuf>,
    share_uids: Vec<u32>,
    share_mode: u32,
    share_gpu: bool,
) -> PyResult<Client> {
    let ticket: Ticket = ticket.parse().map_err(Kind::Ticket.because(py))?;
    let sources: Result<Vec<Ticket>, _> = sources.iter().map(|source| source.parse()).collect();
    let options = GpuOptions { memory_bytes: gpu_memory_bytes, pinned_bytes, chunk_bytes: CHUNK_BYTES };
    let gpus = Gpus::new(py, options)?;
    let open = |ordinal| gpus.device(py, ordinal).map_err(|error| error.raise(py));
    let device = parse_device(py, device)?.map(open).transpose()?;
    if ready_within.is_some() && admin.is_none() {
        return Err(Kind::Request.raise(py, "ready_within has no effect without admin=\"IP:PORT\""));
    }
    let choices = [("process", *THIS_PROCESS), ("client", Config::default().consumer)];
    let counted_as = one_of(py, "consumer", consumer, &choices)?;
    let consumer = Consumer::new(seconds("ready_within", ready_within)?);
    let host = share_host.map(|path| HostOptions { path, mode: share_mode, uids: share_uids });
    if host.is_some() && device.is_some() {
        return Err(Kind::Request.raise(py, "share_host shares host memory: leave device=\"cuda\" out"));
    }
    let offer = (share_listen, share_rate, share_mem);
    let options = SharingOptions { host, swarm: parse_share(py, &share, site, offer)?, memory_bytes };
    let _in_runtime = runtime::handle(py)?.enter();
    let sharing = Sharing::open(&options).map_err(|error| Kind::Other.raise(py, format!("{error:#}")))?;
    // Before connecting, so that /readyz answers "not ready" meanwhile.
    let admin = admin::open(py, admin, admin_token_file, |address, token_file| {
        AdminPort::for_consumer(address, token_file, consumer.clone())
    })?;
    let config = Config {
        device: device.clone(),
        share_gpu,
        memory_bytes: memory_bytes.unwrap_or(u64::MAX),
        base_bytes,
        consumer: counted_as,
        sources: sources.map_err(Kind::Ticket.because(py))?,
        lanes: parse_lanes(py, lanes)?,
        transport: parse_transport(py, transport)?,
        identity: identity_of(py, identity.as_deref(), certificate.as_deref())?,
        topic_timeout: finite_seconds("topic_timeout", topic_timeout)?,
        stall_timeout: positive_seconds(py, "stall_timeout", stall_timeout)?,
        reconnect_timeout: finite_seconds("reconnect_timeout", reconnect_timeout)?,
        versions_held_max: at_least(py, "versions_held_max", versions_held_max, 1)?,
        hold_timeout: finite_seconds("hold_timeout", hold_timeout)?,
        volatile_snapshots: true, // Views of tensors are writable.
        ..Config::default()
    };
    let config = sharing.configure(config);
    let timeout = finite_seconds("timeout", timeout)?;
    let connected = wait(py, client::Client::connect_within(timeout, &ticket, config))?;
    let client = connected.map_err(|error| of_client(py, &error))?;
    consumer.connected(client.status_reader(), device.as_ref());
    Ok(Client::new((client, sharing), ticket, gpus, consumer, admin))
}

/// The client's key and certificate, if the user gave their files.
fn identity_of(
    py: Python<'_>,
    key: Option<&Path>,
    certificate: Option<&Path>,
) -> PyResult<Option<Arc<Identity>>> {
    match (key, certificate) {
        (None, None) => Ok(None),
        (None, Some(_)) => {
            Err(Kind::Request.raise(py, "certificate needs the file of its key: give identity too"))
        }
        (Some(key), _) => {
            let identity = Identity::from_files(key, certificate).map_err(Kind::Other.because(py))?;
            Ok(Some(Arc::new(identity)))
        }
    }
}

/// How chunks are taken from other subscribers and offered to them: `False`, `True` or "take".
fn parse_share(
    py: Python<'_>,
    share: &Bound<'_, PyAny>,
    site: &str,
    (listen, rate, kept_bytes): (&str, Option<u64>, Option<u64>),
) -> PyResult<Option<SwarmOptions>> {
    let site = Site::new(site).map_err(Kind::Request.because(py))?;
    match share.extract::<bool>() {
        Ok(false) => Ok(None),
        Ok(true) => {
            let addresses = addresses_of(py, listen)?;
            let Some(listen) = addresses.first().copied() else {
                return Err(no_address(py, listen, &"the name has no address"));
            };
            Ok(Some(SwarmOptions { site, offer: Some(OfferOptions { listen, rate, kept_bytes }) }))
        }
        Err(_) if share.extract::<&str>().is_ok_and(|share| share == "take") => {
            Ok(Some(SwarmOptions { site, offer: None }))
        }
        Err(_) => Err(Kind::Request.raise(py, "share is True, False, or \"take\"")),
    }
}

fn parse_lanes(py: Python<'_>, lanes: Option<u32>) -> PyResult<Lanes> {
    match lanes {
        None => Ok(Lanes::Auto),
        Some(lanes) => within(py, "lanes", lanes, 1..=LANES_MAX).map(Lanes::Fixed),
    }
}
