//! Checks of the processor: the number available, and the instructions for encryption and codecs.

use super::{
    cgroup::Cgroup,
    finding::{Finding, Fix, State},
};

const PROCESSOR_FIX: Fix = Fix {
    host: "a processor of the last ten years, or a virtual machine that exposes its instructions (CPU type `host`)",
    docker: "the same for the host: containers use its processor",
    kubernetes: "nodes of another type (nodeSelector)",
};

pub(super) fn check() -> Vec<Finding> {
    let count = std::thread::available_parallelism().map_or(1, |count| count.get());
    vec![processors(count, Cgroup::own().processors()), encryption(has_aes()), vectors(has_vectors())]
}

fn processors(count: usize, quota: Option<f64>) -> Finding {
    let fix = Fix {
        host: "two processors or more: one moves packets while another encodes, hashes or encrypts",
        docker: "--cpus 2 or more",
        kubernetes: "resources.limits.cpu: 2 or more, or no limit: a used-up quota pauses all threads of the process",
    };
    let processors = quota.map_or(count as f64, |quota| quota.min(count as f64));
    let measured = match quota {
        Some(quota) => format!("{count}, within a quota of {quota:.1}"),
        None => format!("{count}, without a quota"),
    };
    Finding::judge("processors", (processors >= 2.0, State::Warn), measured, "2 or more", fix)
}

fn encryption(has_aes: bool) -> Finding {
    let measured = if has_aes { "AES instructions" } else { "no AES instructions" };
    let wanted = "AES instructions: without them, encryption is many times slower";
    Finding::judge("encryption", (has_aes, State::Warn), measured, wanted, PROCESSOR_FIX)
}

fn vectors(has_vectors: bool) -> Finding {
    let measured = if has_vectors { "vector instructions" } else { "no AVX2" };
    let wanted = "AVX2 (x86) or NEON (Arm): without them, codecs are several times slower";
    Finding::judge("codecs", (has_vectors, State::Warn), measured, wanted, PROCESSOR_FIX)
}

#[cfg(target_arch = "x86_64")]
fn has_aes() -> bool {
    std::is_x86_feature_detected!("aes") && std::is_x86_feature_detected!("pclmulqdq")
}

#[cfg(target_arch = "x86_64")]
fn has_vectors() -> bool {
    std::is_x86_feature_detected!("avx2")
}

#[cfg(target_arch = "aarch64")]
fn has_aes() -> bool {
    std::arch::is_aarch64_feature_detected!("aes")
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn has_aes() -> bool {
    true // Not detectable.
}

#[cfg(not(target_arch = "x86_64"))]
fn has_vectors() -> bool {
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quota_limits_the_processors() {
        assert_eq!(processors(8, None).state, State::Ok);
        assert_eq!(processors(8, Some(1.5)).state, State::Warn);
        assert_eq!(processors(1, None).state, State::Warn);
        assert_eq!((encryption(false).state, vectors(false).state), (State::Warn, State::Warn));
    }
}
