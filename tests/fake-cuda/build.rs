//! Sets the library's soname to that of CUDA's driver.

/// The dynamic linker reuses a loaded library whose soname is the requested one. So a test loads `libfake_cuda.so` by
/// its path, and later loads of `libcuda.so` get it.
fn main() {
    // Not `rustc-cdylib-link-arg`, which dependent libraries inherit.
    println!("cargo::rustc-link-arg=-Wl,-soname,libcuda.so");
    println!("cargo::rerun-if-changed=build.rs");
}
