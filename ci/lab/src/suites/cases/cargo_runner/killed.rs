//! A test that ends its program by a signal, in a guest that has nothing of the one before.

#[test]
fn is_killed() {
    if !std::path::Path::new("/tmp/of-the-guest").exists() {
        std::process::abort();
    }
}
