//! How often the program copies what it transfers.

use crate::files;
use std::{fs, process::Command};
use tensor_relay_tests::processes::{ANY_PORT, Home, ON_HOST, Process, Serving, replace_function};

const MODEL_BYTES: usize = 64 << 20;

/// Counts the bytes of copies of 4 KiB and more, which are no bookkeeping, in the file $TENSOR_RELAY_TEST_COPIED.
const COUNTING: &str = r#"
    #include <fcntl.h>
    #include <stdint.h>
    #include <stdlib.h>
    #include <sys/mman.h>
    #include <unistd.h>

    static uint64_t nowhere, *copied = &nowhere;

    __attribute__((constructor)) static void share(void) {
        int file = open(getenv("TENSOR_RELAY_TEST_COPIED"), O_RDWR);
        void *page = mmap(NULL, sizeof *copied, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (page != MAP_FAILED) copied = page;
        close(file);
    }

    void *memmove(void *to, const void *from, size_t bytes) {
        if (bytes >= 4096) __atomic_fetch_add(copied, bytes, __ATOMIC_RELAXED);
        char *target = to;
        const char *source = from;
        if ((uintptr_t)to - (uintptr_t)from >= bytes) {
            __asm__ volatile("rep movsb" : "+D"(target), "+S"(source), "+c"(bytes) : : "memory");
        } else {
            while (bytes--) ((volatile char *)target)[bytes] = source[bytes];
        }
        return to;
    }

    void *memcpy(void *to, const void *from, size_t bytes) { return memmove(to, from, bytes); }
"#;

/// A process whose copies are counted in the file called `counter` of `home`.
fn start_counted(home: &Home, counter: &str, args: &[&str]) -> std::io::Result<Process> {
    fs::write(home.path(counter), [0; 8])?;
    let mut command: Command = home.program();
    replace_function(&mut command, &home.path(""), COUNTING)?;
    command.env("TENSOR_RELAY_TEST_COPIED", home.path(counter)).args(args);
    Ok(Process::start(command))
}

/// The bytes that were copied so far.
fn copied(home: &Home, counter: &str) -> f64 {
    let bytes = fs::read(home.path(counter)).unwrap();
    u64::from_le_bytes(bytes.try_into().unwrap()) as f64
}

/// Goal: no byte of a version is copied once more than is known: never over TCP, where records are encrypted and
/// decrypted from their place to their place; over QUIC, by quinn, once at the server and twice at the client. Method: a
/// library that counts the bytes of `memcpy` and `memmove`.
#[test]
#[cfg(target_arch = "x86_64")]
fn no_chunk_is_copied_once_more() {
    let home = Home::new();
    files::write_noise(&home.path("m"), MODEL_BYTES, 1);
    let serve = ["serve", "--json", ANY_PORT, ON_HOST, "--topic=m=m", "--chunk-size=1MiB"];
    let server = match start_counted(&home, "server", &serve) {
        Ok(server) => Serving::wait_for_report(server),
        Err(reason) => return println!("skipped: the test cannot replace functions here: {reason}"),
    };
    for (transport, of_server, of_client) in [("tcp", 0.0, 0.0), ("quic", 1.0, 2.0)] {
        let before = copied(&home, "server");
        let transport = format!("--transport={transport}");
        let args = ["subscribe", server.ticket("m"), "--once", "--out=out", "--lanes=1", ON_HOST, &transport];
        start_counted(&home, transport.as_str(), &args).unwrap().wait().expect_code(0);
        let by_server = (copied(&home, "server") - before) / MODEL_BYTES as f64;
        let by_client = copied(&home, &transport) / MODEL_BYTES as f64;
        // Beginnings and ends of chunks, and what is no payload, are copied.
        for (found, known) in [(by_server, of_server), (by_client, of_client)] {
            assert!(
                (found - known).abs() < 0.25,
                "{transport}: {by_server:.2} and {by_client:.2} copies of each byte"
            );
        }
    }
}
