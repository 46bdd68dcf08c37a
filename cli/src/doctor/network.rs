//! Checks of UDP on this machine: socket buffer limits, and segmentation offload.

use super::finding::{Finding, Fix, State};
use crate::units;
use nix::sys::socket::{getsockopt, setsockopt, sockopt};
use std::{io, net::UdpSocket, time::Duration};
use tensor_relay_client::Tuning;

/// The size of a packet that any network carries.
const SEGMENT: usize = 1_200;

/// How many packets are sent at once.
const SEGMENTS: usize = 8;

/// How long packets may take on this machine.
const PATIENCE: Duration = Duration::from_secs(2);

const BATCHES: Fix = Fix {
    host: "Linux 5.0 or newer, without a firewall rule or security module that refuses UDP_SEGMENT and UDP_GRO; until then \
           --transport tcp is faster",
    docker: "a newer kernel on the host, or a runtime that is not gVisor; until then --transport tcp is faster",
    kubernetes: "a newer kernel on the node, or a RuntimeClass that is not gVisor; until then --transport tcp is faster",
};

pub(super) fn check() -> Vec<Finding> {
    let mut findings = vec![];
    match buffers(Tuning::default().socket_buffer_bytes as usize) {
        Ok(granted) => findings.push(judge_buffers(granted, Tuning::default().socket_buffer_bytes as usize)),
        Err(error) => findings.push(no_socket(&error)),
    }
    findings.extend(batches());
    findings
}

fn no_socket(error: &io::Error) -> Finding {
    let fix = Fix {
        host: "let this user open UDP sockets, or use --transport tcp",
        docker: "the default seccomp profile allows UDP; or use --transport tcp",
        kubernetes: "seccompProfile: RuntimeDefault allows UDP; or use --transport tcp",
    };
    Finding::fail("UDP buffers", format!("no UDP socket can be had: {error}"), "UDP sockets", fix)
}

/// How much a receive buffer really has when `wanted` is asked for, as a server or a consumer asks.
fn buffers(wanted: usize) -> io::Result<usize> {
    let socket = UdpSocket::bind("0.0.0.0:0")?;
    // Beyond the system's limit where this process may (CAP_NET_ADMIN).
    let asked = setsockopt(&socket, sockopt::RcvBufForce, &wanted);
    asked.or_else(|_| setsockopt(&socket, sockopt::RcvBuf, &wanted))?;
    // The kernel doubles what it grants, for its own bookkeeping.
    Ok(getsockopt(&socket, sockopt::RcvBuf)? / 2)
}

fn judge_buffers(granted: usize, wanted: usize) -> Finding {
    let fix = Fix {
        host: "sysctl -w net.core.rmem_max=4194304 net.core.wmem_max=4194304, and the same in /etc/sysctl.d for later",
        docker: "the same sysctl on the host (a container cannot change it), or --cap-add NET_ADMIN",
        kubernetes: "the same sysctl on the node (it is not namespaced), or the capability NET_ADMIN",
    };
    let measured =
        format!("{} granted of {} asked for", units::bytes(granted as u64), units::bytes(wanted as u64));
    let wanted_text = format!("{}; with less, QUIC loses packets in bursts", units::bytes(wanted as u64));
    Finding::judge("UDP buffers", (granted >= wanted, State::Warn), measured, wanted_text, fix)
}

/// Sends a batch over loopback with one call, and looks whether it comes as one.
fn batches() -> Vec<Finding> {
    const SEND: &str = "UDP send batches";
    const RECEIVE: &str = "UDP receive batches";
    let wanted = "batches: without them each packet costs a call";
    match try_batch() {
        Err(error) => {
            let measured = format!("a batch could not be sent over loopback (UDP_SEGMENT): {error}");
            vec![Finding::warn(SEND, measured, wanted, BATCHES)]
        }
        Ok(Batch { received, is_gro_allowed }) => {
            let sent = Finding::ok(SEND, format!("{SEGMENTS} packets with one call"), wanted);
            let measured = match is_gro_allowed {
                true => format!("{} packets with one call", received / SEGMENT),
                false => "the system refuses UDP_GRO".into(),
            };
            let is_good = is_gro_allowed && received > SEGMENT;
            vec![sent, Finding::judge(RECEIVE, (is_good, State::Warn), measured, wanted, BATCHES)]
        }
    }
}

struct Batch {
    /// Bytes that came first.
    received: usize,
    is_gro_allowed: bool,
}

fn try_batch() -> io::Result<Batch> {
    let (from, to) = (UdpSocket::bind("127.0.0.1:0")?, UdpSocket::bind("127.0.0.1:0")?);
    let is_gro_allowed = setsockopt(&to, sockopt::UdpGroSegment, &true).is_ok();
    setsockopt(&from, sockopt::UdpGsoSegment, &(SEGMENT as i32))?;
    to.set_read_timeout(Some(PATIENCE))?;
    from.send_to(&[0; SEGMENT * SEGMENTS], to.local_addr()?)?;
    let received = to.recv(&mut [0; SEGMENT * SEGMENTS])?;
    Ok(Batch { received, is_gro_allowed })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_that_are_clamped_are_told() {
        assert_eq!(judge_buffers(4 << 20, 4 << 20).state, State::Ok);
        let clamped = judge_buffers(212_992, 4 << 20);
        assert_eq!(clamped.state, State::Warn);
        assert!(clamped.measured.contains("208 KiB granted of 4.00 MiB"), "{clamped:?}");
        assert!(clamped.fix.unwrap().host.contains("rmem_max=4194304"));
    }
}
