//! `tensor_relay.serve`: starts a server.

use crate::{
    admin,
    errors::Kind,
    gpu::{GpuOptions, Gpus, parse_device},
    range::{at_least, one_of, positive_seconds, within},
    relay::Relay,
    runtime,
    tickets::Tickets,
    wait::{finite_seconds, wait_at_most},
};
use pyo3::prelude::*;
use std::{fmt::Display, net::SocketAddr, path::PathBuf, time::Duration};
use tensor_relay_cli::AdminPort;
use tensor_relay_server::{
    Access, AccessStore, Advertised, CodecChoice, CodecId, Config, Fingerprint, Identity, Limits, Listener,
    PAYLOAD_ALIGNMENT, PeerDialling, Rules, Server, SocketListener, Ticket, Transport, Tuning, reachable,
};

/// Starts a server in this process. `tensor_relay.serve` documents the options.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "keywords, each with its name where it is called")]
pub(crate) fn serve(
    py: Python<'_>,
    listen: &str,
    advertise: Vec<String>,
    state_dir: Option<PathBuf>,
    codec: &str,
    chunk_bytes: u32,
    staged_bytes: Option<u64>,
    base_bytes: u64,
    sessions_max: usize,
    stall_timeout: f64,
    reader_linger: f64,
    transport: &str,
    open: bool,
    ephemeral: bool,
    device: &str,
    gpu_memory_bytes: Option<u64>,
    pinned_bytes: u64,
    admin: Option<&str>,
    admin_token_file: Option<PathBuf>,
    socket: Option<PathBuf>,
    socket_mode: u32,
    share_gpu: bool,
) -> PyResult<Relay> {
    let config = Config {
        codec: parse_codec(py, codec)?,
        chunk_bytes: chunk_bytes_within(py, chunk_bytes)?,
        staged_bytes: staged_bytes.unwrap_or(u64::MAX),
        base_bytes,
        sessions_max: at_least(py, "sessions_max", sessions_max, 1)?,
        stall_timeout: positive_seconds(py, "stall_timeout", stall_timeout)?,
        reader_linger: finite_seconds("reader_linger", reader_linger)?,
        share_gpu,
        peers: Some(PeerDialling::over_network(&[])),
        ..Config::default()
    }
    .for_container(None);
    let options = GpuOptions { memory_bytes: gpu_memory_bytes, pinned_bytes, chunk_bytes };
    let (gpus, device) = (Gpus::new(py, options)?, parse_device(py, device)?);
    let staging_gpu = device.map(|ordinal| gpus.device(py, ordinal)).transpose();
    let staging_gpu = staging_gpu.map_err(|error| error.raise(py))?;
    let state_dir = match ephemeral {
        true => None,
        false => Some(state_dir.or_else(Identity::default_dir).ok_or_else(|| {
            Kind::Other.raise(
                py,
                "there is no home directory to keep the server's key in: give state_dir, or ephemeral=True",
            )
        })?),
    };
    let identity = state_dir.as_deref().map_or_else(Identity::ephemeral, Identity::load_or_create);
    let identity = identity.map_err(Kind::Other.because(py))?;
    let store = state_dir.filter(|_| !open).map(|dir| AccessStore::open(&dir)).transpose();
    let store = store.map_err(Kind::Other.because(py))?;
    let _in_runtime = runtime::handle(py)?.enter();
    let access = match &store {
        Some(store) => store.watch_changes().map_err(Kind::Other.because(py))?,
        None if open => Access::open(),
        None => Access::new(Rules::ephemeral()),
    };
    let mut listener = listener_on(py, listen, parse_transport(py, transport)?, &identity)?;
    if let Some(path) = socket {
        let socket = SocketListener::bind(&path, socket_mode).map_err(Kind::Other.because(py))?;
        listener = listener.and_socket(socket);
    }
    // If the training process leaves too little memory for it, versions and sessions are refused when they come.
    let reserved = config.reserve().ok();
    let server = Server::start(listener, access.clone(), config).with_reservation(reserved);
    let admin = admin::open(py, admin, admin_token_file, |address, token_file| {
        AdminPort::for_server(address, token_file, server.status_reader(), staging_gpu.as_ref())
    })?;
    let address = server.local_address();
    let ticket = make_ticket(py, &advertise, address, identity.fingerprint())?;
    Ok(Relay::new((server, admin), address, Tickets { bare: ticket, access, store }, gpus, device))
}

/// The deadline for resolving a name.
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(10);

/// Listens on the first usable one of the addresses that `listen` resolves to.
fn listener_on(
    py: Python<'_>,
    listen: &str,
    transport: Transport,
    identity: &Identity,
) -> PyResult<Listener> {
    let mut refused = no_address(py, listen, &"the name has no address");
    for address in addresses_of(py, listen)? {
        match Listener::bind_for(transport, address, identity, Tuning::default()) {
            Ok(listener) => return Ok(listener),
            Err(error) => refused = Kind::Other.raise(py, error),
        }
    }
    Err(refused)
}

/// The addresses that `listen`, an `IP:PORT` or `HOST:PORT`, resolves to.
pub(crate) fn addresses_of(py: Python<'_>, listen: &str) -> PyResult<Vec<SocketAddr>> {
    let lookup = async { tokio::net::lookup_host(listen).await.map(Vec::from_iter) };
    match wait_at_most(py, Some(LOOKUP_TIMEOUT), lookup)? {
        Some(Ok(addresses)) => Ok(addresses),
        Some(Err(error)) => Err(no_address(py, listen, &error)),
        None => Err(no_address(py, listen, &"the resolver did not answer")),
    }
}

/// The `RequestError` for an address that cannot be resolved.
pub(crate) fn no_address(py: Python<'_>, listen: &str, why: &dyn Display) -> PyErr {
    let message = format!(
        "{listen:?} is no address to listen on ({why}): write IP:PORT or HOST:PORT, as in 0.0.0.0:4747"
    );
    Kind::Request.raise(py, message)
}

/// The length of chunks, within the limits of all clients.
fn chunk_bytes_within(py: Python<'_>, chunk_bytes: u32) -> PyResult<u32> {
    let (step, most) = (PAYLOAD_ALIGNMENT as u32, Limits::default().chunk_bytes);
    within(py, "chunk_bytes", chunk_bytes, step..=most)?;
    match chunk_bytes.is_multiple_of(step) {
        true => Ok(chunk_bytes),
        false => {
            let message = format!("chunk_bytes is {chunk_bytes}, but must be a multiple of {step}");
            Err(Kind::Request.raise(py, message))
        }
    }
}

/// The transport with this name.
pub(crate) fn parse_transport(py: Python<'_>, name: &str) -> PyResult<Transport> {
    let choices = [("auto", Transport::Auto), ("quic", Transport::Quic), ("tcp", Transport::Tcp)];
    one_of(py, "transport", name, &choices)
}

fn parse_codec(py: Python<'_>, name: &str) -> PyResult<CodecChoice> {
    let fixed = CodecId::ALL.iter().map(|codec| (codec.name(), CodecChoice::Fixed(*codec)));
    let choices: Vec<_> = [("auto", CodecChoice::Auto)].into_iter().chain(fixed).collect();
    one_of(py, "codec", name, &choices)
}

/// A ticket without a topic, for a server on `address`.
fn make_ticket(
    py: Python<'_>,
    advertise: &[String],
    address: SocketAddr,
    key: Fingerprint,
) -> PyResult<Ticket> {
    let mut addresses = vec![];
    for text in advertise {
        let advertised: Advertised = text.parse().map_err(Kind::Request.because(py))?;
        addresses.push(advertised.with_port(address.port()));
    }
    if addresses.is_empty() {
        addresses.extend(reachable(address).iter().map(SocketAddr::to_string));
        if address.ip().is_unspecified() {
            tracing::info!(
                ?addresses,
                "The ticket has this machine's addresses by its default route; set `advertise` for another."
            );
        }
    }
    Ticket::new(addresses, vec![key.0], None).map_err(Kind::Request.because(py))
}
