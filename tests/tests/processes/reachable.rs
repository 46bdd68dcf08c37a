//! The addresses on which a server is reached, and those that its tickets name.

use crate::files;
use std::process::Command;
use tensor_relay_tests::{
    processes::{Home, Process, Serving, replace_function},
    skip,
};

/// The port of an address.
fn port(server: &Serving) -> &str {
    server.listen().rsplit_once(':').unwrap().1
}

/// A server's ticket for `w` with another address.
fn at(server: &Serving, host: &str) -> String {
    let (_, rest) = server.ticket("w").split_once("://").unwrap();
    let (_, rest) = rest.split_once('/').unwrap();
    format!("relay://{host}:{}/{rest}", port(server))
}

/// Goal: `[::]`, the default, is reached over IPv4 and IPv6, over either transport; tickets name no unspecified address.
#[test]
fn a_server_on_every_address_is_reached_over_both_protocols() {
    let home = files::home_with_model();
    let server = home.serve(&["--topic=w=w", "--listen=[::]:0"]);
    let named = server.ticket("w").split_once('?').unwrap().0.to_owned();
    assert!(!named.contains("[::]") && !named.contains("0.0.0.0"), "{named}");
    for host in ["127.0.0.1", "[::1]"] {
        for transport in ["--transport=quic", "--transport=tcp"] {
            home.run(&["subscribe", &at(&server, host), "--once", transport]).expect_code(0);
        }
    }
    let help = home.run(&["serve", "--help"]).expect_code(0).out;
    assert!(help.contains("[default: [::]:4747]"), "{help}");
}

/// Goal: an address that would lead clients to themselves is refused. Method: every form of it.
#[test]
fn unspecified_addresses_are_not_advertised() {
    let home = files::home_with_model();
    for host in ["0.0.0.0", "0.0.0.0:4747", "::", "[::]:4747"] {
        let advertise = format!("--advertise={host}");
        let refused = home
            .run(&["serve", "--topic=w=w", "--listen=127.0.0.1:0", &advertise])
            .expect_code(2);
        assert!(refused.err.contains("every address of a machine"), "{refused:?}");
    }
}

/// Goal: a machine without a default route is told that its tickets are of no use elsewhere. Method: a namespace with
/// the loopback interface alone.
#[test]
fn without_a_route_the_ticket_is_explained() {
    let home = files::home_with_model();
    let mut namespace = home.isolated(Command::new("unshare"));
    namespace.args(["-n", "sh", "-c", "ip link set lo up && exec \"$@\"", "sh"]);
    if !Command::new("unshare")
        .args(["-n", "ip", "link", "set", "lo", "up"])
        .status()
        .is_ok_and(|s| s.success())
    {
        return skip("this process may not create a network namespace");
    }
    namespace.arg(home.program().get_program());
    namespace.args(["serve", "--json", "--listen=[::]:0", "--topic=w=w", "--admin=none"]);
    let mut server = Process::start(namespace);
    server.wait_for_stderr("warning: this machine has no default route, so the tickets name 127.0.0.1:");
    let server = Serving::wait_for_report(server);
    assert!(server.ticket("w").starts_with("relay://127.0.0.1:"), "{}", server.ticket("w"));
}

/// Goal: the default also works on a system without IPv6. Method: a shim that refuses such sockets.
#[test]
fn a_server_starts_without_ipv6() {
    const SOCKET: &str = r#"
        #include <errno.h>
        #include <unistd.h>
        #include <sys/socket.h>
        #include <sys/syscall.h>
        int socket(int family, int type, int protocol) {
            if (family == AF_INET6) { errno = EAFNOSUPPORT; return -1; }
            return syscall(SYS_socket, family, type, protocol);
        }"#;
    let home = Home::new();
    files::write_noise(&home.path("w"), 1000, 1);
    let mut command = home.program();
    if let Err(reason) = replace_function(&mut command, &home.path(""), SOCKET) {
        return skip(reason);
    }
    command.args(["serve", "--json", "--listen=[::]:0", "--topic=w=w", "--admin=none"]);
    let server = Serving::wait_for_report(Process::start(command));
    assert!(server.listen().starts_with("0.0.0.0:"), "{}", server.listen());
    home.run(&["subscribe", &at(&server, "127.0.0.1"), "--once"]).expect_code(0);
}
