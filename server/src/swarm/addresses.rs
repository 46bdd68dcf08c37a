//! The rules of the addresses that a server dials back (PROTOCOL.md §3.15).

use super::PeerNetwork;
use std::net::{IpAddr, SocketAddr};
use tensor_relay_protocol::PeerAddress;

/// The lowest port that is dialled: those below are of services of the system.
const PORT_MIN: u16 = 1_024;

/// Those of `told` that may be dialled for a session from the address `session`: with its own address, for which an
/// unspecified one stands, or in one of `networks`. So a client cannot make the server connect to the services of others.
pub(super) fn permitted(told: &[PeerAddress], session: IpAddr, networks: &[PeerNetwork]) -> Vec<PeerAddress> {
    let session = session.to_canonical();
    let permitted = told.iter().filter_map(|told| {
        let ip = match told.address.ip().to_canonical() {
            ip if ip.is_unspecified() => session,
            ip => ip,
        };
        let is_named = ip == session || networks.iter().any(|network| network.contains(ip));
        let is_permitted = is_named && told.address.port() >= PORT_MIN && is_of_a_host(ip, session);
        is_permitted.then(|| PeerAddress { address: SocketAddr::new(ip, told.address.port()), ..*told })
    });
    permitted.collect()
}

/// Whether `ip` can be the address of another host, or of this one for a client that is on it.
fn is_of_a_host(ip: IpAddr, session: IpAddr) -> bool {
    let is_link_local = match ip {
        IpAddr::V4(ip) => ip.is_link_local() || ip.is_broadcast(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    };
    !ip.is_unspecified() && !ip.is_multicast() && !is_link_local && (!ip.is_loopback() || ip == session)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tensor_relay_protocol::Transport;

    fn dialled(told: &str, session: &str, networks: &[&str]) -> Option<String> {
        let networks: Vec<PeerNetwork> = networks.iter().map(|network| network.parse().unwrap()).collect();
        let told = [PeerAddress { transport: Transport::Tcp, address: told.parse().unwrap() }];
        let permitted = permitted(&told, session.parse().unwrap(), &networks);
        assert!(permitted.iter().all(|address| address.transport == Transport::Tcp));
        permitted.first().map(|permitted| permitted.address.to_string())
    }

    #[test]
    fn the_address_of_the_session_is_dialled() {
        for (told, session, expected) in [
            ("10.0.0.2:4000", "10.0.0.2", "10.0.0.2:4000"),
            ("10.0.0.2:1024", "::ffff:10.0.0.2", "10.0.0.2:1024"),
            ("[::ffff:10.0.0.2]:4000", "10.0.0.2", "10.0.0.2:4000"),
            ("0.0.0.0:4000", "10.0.0.2", "10.0.0.2:4000"),
            ("[::]:4000", "10.0.0.2", "10.0.0.2:4000"),
            ("[::]:4000", "fd00::2", "[fd00::2]:4000"),
            ("0.0.0.0:4000", "127.0.0.1", "127.0.0.1:4000"),
            ("[::1]:4000", "::1", "[::1]:4000"),
        ] {
            assert_eq!(dialled(told, session, &[]).as_deref(), Some(expected), "{told} of {session}");
        }
    }

    #[test]
    fn other_addresses_are_dialled_only_in_named_networks() {
        assert_eq!(dialled("10.0.0.3:4000", "10.0.0.2", &[]), None);
        assert_eq!(dialled("10.0.0.3:4000", "10.0.0.2", &["10.1.0.0/16", "fd00::/8"]), None);
        let named = dialled("10.0.0.3:4000", "10.0.0.2", &["10.1.0.0/16", "10.0.0.0/24"]);
        assert_eq!(named.as_deref(), Some("10.0.0.3:4000"));
    }

    /// Even if the operator's network has it, or the session comes from it.
    #[test]
    fn some_addresses_are_never_dialled() {
        let everything = ["0.0.0.0/0", "::/0"];
        for (told, session) in [
            ("10.0.0.2:1023", "10.0.0.2"),
            ("10.0.0.2:0", "10.0.0.2"),
            ("127.0.0.1:4000", "10.0.0.2"),
            ("127.0.0.2:4000", "127.0.0.1"),
            ("[::1]:4000", "10.0.0.2"),
            ("[::ffff:127.0.0.1]:4000", "10.0.0.2"),
            ("169.254.169.254:4000", "10.0.0.2"),
            ("169.254.1.1:4000", "169.254.1.1"),
            ("[fe80::1]:4000", "fe80::1"),
            ("224.0.0.1:4000", "10.0.0.2"),
            ("[ff02::1]:4000", "fd00::2"),
            ("255.255.255.255:4000", "10.0.0.2"),
            ("0.0.0.0:4000", "0.0.0.0"),
        ] {
            assert_eq!(dialled(told, session, &everything), None, "{told} of {session}");
        }
    }
}
