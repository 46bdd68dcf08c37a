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

pub(super) fn check(cgroup: &Cgroup) -> Vec<Finding> {
    let count = std::thread::available_parallelism().map_or(1, usize::from);
    let (has_aes, has_vectors) = features();
    vec![processors(count, cgroup.processors()), encryption(has_aes), vectors(has_vectors)]
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
    Finding::new("processors", State::Warn.unless(processors >= 2.0), measured, "2 or more", fix)
}

fn encryption(has_aes: bool) -> Finding {
    let measured = if has_aes { "AES instructions" } else { "no AES instructions" };
    let wanted = "AES instructions: without them, encryption is many times slower";
    Finding::new("encryption", State::Warn.unless(has_aes), measured, wanted, PROCESSOR_FIX)
}

fn vectors(has_vectors: bool) -> Finding {
    let measured = if has_vectors { "vector instructions" } else { "no AVX2" };
    let wanted = "AVX2 (x86) or NEON (Arm): without them, codecs are several times slower";
    Finding::new("codecs", State::Warn.unless(has_vectors), measured, wanted, PROCESSOR_FIX)
}

/// Whether the processor has instructions for AES, and those that codecs use. True where it cannot be detected.
fn features() -> (bool, bool) {
    #[cfg(target_arch = "x86_64")]
    return (
        std::is_x86_feature_detected!("aes") && std::is_x86_feature_detected!("pclmulqdq"),
        std::is_x86_feature_detected!("avx2"),
    );
    #[cfg(target_arch = "aarch64")]
    return (std::arch::is_aarch64_feature_detected!("aes"), true);
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    (true, true)
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
