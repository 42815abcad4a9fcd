//! A safe registration owns its memory: a borrow could end while the device still accesses the memory.
#![allow(unused)]

use uverbs::{Access, ProtectionDomain};

fn register(pd: &ProtectionDomain, owned: Box<[u8]>, borrowed: &mut [u8]) {
    let _ = pd.mr_builder().access(Access::LOCAL_WRITE).register(borrowed);
}

fn main() {
    let _ = register;
}
