//! rdma-core's libraries, opened at run time, and the verbs that make and destroy objects.
//!
//! [`Made`] wraps the object that a verb returns, and only the destroying verb takes it apart. Objects that
//! are not destroyed end with the process.

use crate::abi::function::*;
use crate::abi::{
    AhAttr, Context, Cq, CqAttrEx, CqEx, ExtendedContext, Mr, Opaque, ParentDomainAttr, Pd,
    PortAttr, Qp, QpAttr, QpEx, QpInitAttrEx, Srq, SrqInitAttr, SrqInitAttrEx, TdAttr, XrcdAttr,
    number,
};
use lab_bench::Failure;
use libloading::Library;
use std::ffi::{CStr, c_int, c_void};
use std::io;
use std::mem::offset_of;
use std::ptr::{NonNull, null, null_mut};
use std::sync::atomic::AtomicU64;

const LIBRARY: &str = "libibverbs.so.1";
const MLX5: &str = "libmlx5.so.1";

/// An object that the library made.
pub(crate) struct Made<T>(NonNull<T>);

// SAFETY: the library locks what its objects share, except under thread domains, which each thread
// here has of its own.
unsafe impl<T> Send for Made<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Made<T> {}

impl<T> Made<T> {
    /// From a verb's result, null for a failure that `errno` names.
    pub(crate) fn check(verb: &str, answer: *mut T) -> Result<Made<T>, Failure> {
        match NonNull::new(answer) {
            Some(object) => Ok(Made(object)),
            None => Err(format!("{verb}: {}", io::Error::last_os_error()).into()),
        }
    }

    pub(crate) fn as_ptr(&self) -> *mut T {
        self.0.as_ptr()
    }
}

/// From the result of a verb that returns an error number.
pub(crate) fn done(verb: &str, answer: c_int) -> Result<(), Failure> {
    match answer {
        0 => Ok(()),
        errno => Err(format!("{verb}: {}", io::Error::from_raw_os_error(errno)).into()),
    }
}

/// A function of a library.
///
/// # Safety
///
/// `F` must be a function pointer of the type that the library's header declares.
pub(crate) unsafe fn symbol<F: Copy>(library: &Library, name: &str) -> Result<F, Failure> {
    // SAFETY: the caller vouches for the type.
    let symbol = unsafe { library.get::<F>(name.as_bytes()) };
    symbol.map(|symbol| *symbol).map_err(|error| format!("{name}: {error}").into())
}

/// Declares the library's functions, each with its type from [`crate::abi::function`].
macro_rules! functions {
    ($($field:ident: $type:ty = $name:literal,)*) => {
        /// libibverbs.
        pub(crate) struct Verbs {
            $($field: $type,)*
            // Its functions are above.
            _library: Library,
        }

        impl Verbs {
            /// Opens the library.
            pub(crate) fn load() -> Result<Verbs, Failure> {
                // SAFETY: its constructors ask nothing of the program.
                let library = unsafe { Library::new(LIBRARY) }?;
                Ok(Verbs {
                    $(
                        // SAFETY: the type is that of the header.
                        $field: unsafe { symbol::<$type>(&library, $name) }?,
                    )*
                    _library: library,
                })
            }
        }
    };
}

functions! {
    get_device_list: GetDeviceList = "ibv_get_device_list",
    free_device_list: FreeDeviceList = "ibv_free_device_list",
    get_device_name: GetDeviceName = "ibv_get_device_name",
    open_device: OpenDevice = "ibv_open_device",
    close_device: CloseDevice = "ibv_close_device",
    query_gid: QueryGid = "ibv_query_gid",
    query_port: QueryPort = "ibv_query_port",
    alloc_pd: AllocPd = "ibv_alloc_pd",
    dealloc_pd: DeallocPd = "ibv_dealloc_pd",
    reg_mr: RegMr = "ibv_reg_mr",
    dereg_mr: DeregMr = "ibv_dereg_mr",
    create_comp_channel: CreateChannel = "ibv_create_comp_channel",
    create_cq: CreateCq = "ibv_create_cq",
    destroy_cq: DestroyCq = "ibv_destroy_cq",
    create_srq: CreateSrq = "ibv_create_srq",
    create_qp: CreateQp = "ibv_create_qp",
    modify_qp: ModifyQp = "ibv_modify_qp",
    destroy_qp: DestroyQp = "ibv_destroy_qp",
    qp_to_qp_ex: QpToQpEx = "ibv_qp_to_qp_ex",
    create_ah: CreateAh = "ibv_create_ah",
    destroy_ah: DestroyAh = "ibv_destroy_ah",
}

/// Calls a function of the library on objects that are there.
macro_rules! call {
    ($function:expr, $($argument:expr),*) => {{
        let function = $function;
        // SAFETY: the objects were made by the library and not yet destroyed, for `Made` is taken
        // by what destroys; structures are laid out as its header says and outlive the call.
        unsafe { function($($argument),*) }
    }};
}

impl Verbs {
    /// The names of all devices.
    pub(crate) fn devices(&self) -> Result<Vec<String>, Failure> {
        let mut names = Vec::new();
        self.with_devices(|device| {
            let name = call!(self.get_device_name, device);
            // SAFETY: it is a string that ends, in a device that is there until the list is freed.
            names.push(unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned());
        })?;
        Ok(names)
    }

    /// Opens a device.
    pub(crate) fn open(&self, wanted: &str) -> Result<Made<Context>, Failure> {
        let mut opened = None;
        self.with_devices(|device| {
            let name = call!(self.get_device_name, device);
            // SAFETY: it is a string that ends, in a device that is there until the list is freed.
            if unsafe { CStr::from_ptr(name) }.to_bytes() == wanted.as_bytes() {
                opened = Some(Made::check("open_device", call!(self.open_device, device)));
            }
        })?;
        opened.unwrap_or_else(|| Err(format!("there is no device {wanted}").into()))
    }

    fn with_devices(&self, mut each: impl FnMut(*mut Opaque)) -> Result<(), Failure> {
        let mut count = 0;
        let list = Made::check("get_device_list", call!(self.get_device_list, &mut count))?;
        for place in 0..usize::try_from(count)? {
            // SAFETY: the list has `count` entries.
            let entry = unsafe { list.as_ptr().add(place) };
            // SAFETY: as above.
            each(unsafe { *entry });
        }
        call!(self.free_device_list, list.as_ptr());
        Ok(())
    }

    pub(crate) fn close(&self, context: Made<Context>) -> Result<(), Failure> {
        done("close_device", call!(self.close_device, context.as_ptr()))
    }

    /// Asks for the attributes of port 1.
    pub(crate) fn query_port(&self, context: &Made<Context>) -> Result<(), Failure> {
        let mut attr = PortAttr::default();
        done("query_port", call!(self.query_port, context.as_ptr(), 1, &mut attr))
    }

    /// An identifier of port 1, if it has so many.
    pub(crate) fn gid(&self, context: &Made<Context>, index: u8) -> Option<[u8; 16]> {
        let mut gid = [0; 16];
        let answer = call!(self.query_gid, context.as_ptr(), 1, c_int::from(index), &mut gid);
        (answer == 0).then_some(gid)
    }

    /// The last identifier of port 1 that maps an IPv4 address: the table has RoCE v1's before
    /// v2's.
    pub(crate) fn ipv4_gid(&self, context: &Made<Context>) -> Result<(u8, [u8; 16]), Failure> {
        let mapped = |gid: &[u8; 16]| gid[..10] == [0; 10] && gid[10..12] == [0xff; 2];
        (0..16)
            .filter_map(|index| Some((index, self.gid(context, index).filter(mapped)?)))
            .next_back()
            .ok_or_else(|| "port 1 has no IPv4 address".into())
    }

    pub(crate) fn alloc_pd(&self, context: &Made<Context>) -> Result<Made<Pd>, Failure> {
        Made::check("alloc_pd", call!(self.alloc_pd, context.as_ptr()))
    }

    /// Also for parent domains.
    pub(crate) fn dealloc_pd(&self, pd: Made<Pd>) -> Result<(), Failure> {
        done("dealloc_pd", call!(self.dealloc_pd, pd.as_ptr()))
    }

    /// Registers memory with all access; it must stay while the region is there.
    pub(crate) fn reg_mr(&self, pd: &Made<Pd>, memory: &[AtomicU64]) -> Result<Made<Mr>, Failure> {
        let start = memory.as_ptr().cast_mut().cast::<c_void>();
        let access = number::ACCESS_ALL as c_int;
        let made = call!(self.reg_mr, pd.as_ptr(), start, size_of_val(memory), access);
        Made::check("reg_mr", made)
    }

    pub(crate) fn dereg_mr(&self, mr: Made<Mr>) -> Result<(), Failure> {
        done("dereg_mr", call!(self.dereg_mr, mr.as_ptr()))
    }

    pub(crate) fn create_channel(&self, context: &Made<Context>) -> Result<Made<Opaque>, Failure> {
        Made::check("create_comp_channel", call!(self.create_comp_channel, context.as_ptr()))
    }

    pub(crate) fn create_cq(
        &self,
        context: &Made<Context>,
        cqe: c_int,
    ) -> Result<Made<Cq>, Failure> {
        let made = call!(self.create_cq, context.as_ptr(), cqe, null_mut(), null_mut(), 0);
        Made::check("create_cq", made)
    }

    pub(crate) fn destroy_cq(&self, cq: Made<Cq>) -> Result<(), Failure> {
        done("destroy_cq", call!(self.destroy_cq, cq.as_ptr()))
    }

    pub(crate) fn create_srq(&self, pd: &Made<Pd>, max_wr: u32) -> Result<Made<Srq>, Failure> {
        let mut attr = SrqInitAttr { srq_context: null_mut(), max_wr, max_sge: 1, srq_limit: 0 };
        Made::check("create_srq", call!(self.create_srq, pd.as_ptr(), &mut attr))
    }

    pub(crate) fn create_qp(
        &self,
        pd: &Made<Pd>,
        attr: &mut QpInitAttrEx,
    ) -> Result<Made<Qp>, Failure> {
        // The function reads the part that comes first.
        Made::check("create_qp", call!(self.create_qp, pd.as_ptr(), attr))
    }

    pub(crate) fn destroy_qp(&self, qp: Made<Qp>) -> Result<(), Failure> {
        done("destroy_qp", call!(self.destroy_qp, qp.as_ptr()))
    }

    pub(crate) fn modify_qp(
        &self,
        qp: &Made<Qp>,
        mut attr: QpAttr,
        mask: c_int,
    ) -> Result<(), Failure> {
        done("modify_qp", call!(self.modify_qp, qp.as_ptr(), &mut attr, mask))
    }

    /// The extended interface of a queue pair that was created with it.
    pub(crate) fn qp_ex(&self, qp: &Made<Qp>) -> Result<Made<QpEx>, Failure> {
        Made::check("qp_to_qp_ex", call!(self.qp_to_qp_ex, qp.as_ptr()))
    }

    pub(crate) fn create_ah(
        &self,
        pd: &Made<Pd>,
        mut attr: AhAttr,
    ) -> Result<Made<Opaque>, Failure> {
        Made::check("create_ah", call!(self.create_ah, pd.as_ptr(), &mut attr))
    }

    pub(crate) fn destroy_ah(&self, ah: Made<Opaque>) -> Result<(), Failure> {
        done("destroy_ah", call!(self.destroy_ah, ah.as_ptr()))
    }
}

/// A field of the structure around a context, where the library is new enough to have it.
macro_rules! extended {
    ($context:expr, $field:ident) => {
        extended($context)?
            .$field
            .ok_or_else(|| Failure::from(concat!("the library has no ", stringify!($field))))
    };
}

fn extended(context: &Made<Context>) -> Result<&ExtendedContext, Failure> {
    // SAFETY: the context is open.
    let compat = unsafe { (*context.as_ptr()).abi_compat };
    if compat != usize::MAX {
        return Err("the library has no extended verbs".into());
    }
    let start = context.as_ptr().cast::<u8>().wrapping_sub(offset_of!(ExtendedContext, context));
    let around = start.cast::<ExtendedContext>();
    // SAFETY: `abi_compat` says that the context is the last part of a larger structure, in which
    // newer functions lie before older ones; its size stands directly before the context.
    let size = unsafe { (*around).size };
    if size < size_of::<ExtendedContext>() {
        return Err("the library is too old".into());
    }
    // SAFETY: it has at least this part, which does not change while the context is open.
    Ok(unsafe { &*around })
}

impl Verbs {
    pub(crate) fn alloc_td(&self, context: &Made<Context>) -> Result<Made<Opaque>, Failure> {
        let mut attr = TdAttr { comp_mask: 0 };
        let made = call!(extended!(context, alloc_td)?, context.as_ptr(), &mut attr);
        Made::check("alloc_td", made)
    }

    pub(crate) fn dealloc_td(
        &self,
        context: &Made<Context>,
        td: Made<Opaque>,
    ) -> Result<(), Failure> {
        done("dealloc_td", call!(extended!(context, dealloc_td)?, td.as_ptr()))
    }

    pub(crate) fn alloc_parent_domain(
        &self,
        context: &Made<Context>,
        pd: &Made<Pd>,
        td: Option<&Made<Opaque>>,
    ) -> Result<Made<Pd>, Failure> {
        let mut attr = ParentDomainAttr {
            pd: pd.as_ptr(),
            td: td.map_or(null_mut(), Made::as_ptr),
            comp_mask: 0,
            allocators: [null(); 2],
            pd_context: null_mut(),
        };
        let made = call!(extended!(context, alloc_parent_domain)?, context.as_ptr(), &mut attr);
        Made::check("alloc_parent_domain", made)
    }

    pub(crate) fn create_cq_ex(
        &self,
        context: &Made<Context>,
        attr: &mut CqAttrEx,
    ) -> Result<Made<CqEx>, Failure> {
        let made = call!(extended!(context, create_cq_ex)?, context.as_ptr(), attr);
        Made::check("create_cq_ex", made)
    }

    pub(crate) fn create_qp_ex(
        &self,
        context: &Made<Context>,
        attr: &mut QpInitAttrEx,
    ) -> Result<Made<Qp>, Failure> {
        let made = call!(extended!(context, create_qp_ex)?, context.as_ptr(), attr);
        Made::check("create_qp_ex", made)
    }

    /// Opens an XRC domain of its own.
    pub(crate) fn open_xrcd(&self, context: &Made<Context>) -> Result<Made<Opaque>, Failure> {
        // Both fields count; -1 is no file; O_CREAT.
        let mut attr = XrcdAttr { comp_mask: 3, fd: -1, oflags: 0o100 };
        let made = call!(extended!(context, open_xrcd)?, context.as_ptr(), &mut attr);
        Made::check("open_xrcd", made)
    }

    /// Makes a shared receive queue of an XRC domain, and asks for its number.
    pub(crate) fn create_xrc_srq(
        &self,
        context: &Made<Context>,
        attr: &mut SrqInitAttrEx,
    ) -> Result<u32, Failure> {
        let made = call!(extended!(context, create_srq_ex)?, context.as_ptr(), attr);
        let srq = Made::check("create_srq_ex", made)?;
        let mut number = 0;
        let asked = call!(extended!(context, get_srq_num)?, srq.as_ptr(), &mut number);
        done("get_srq_num", asked)?;
        Ok(number)
    }

    pub(crate) fn close_xrcd(
        &self,
        context: &Made<Context>,
        xrcd: Made<Opaque>,
    ) -> Result<(), Failure> {
        done("close_xrcd", call!(extended!(context, close_xrcd)?, xrcd.as_ptr()))
    }
}

/// The verbs of libmlx5 alone.
pub(crate) struct Mlx5 {
    alloc_var: AllocVar,
    free_var: FreeVar,
    _library: Library,
}

impl Mlx5 {
    pub(crate) fn load() -> Result<Mlx5, Failure> {
        // SAFETY: its constructors ask nothing of the program.
        let library = unsafe { Library::new(MLX5) }?;
        // SAFETY: the type is that of the header.
        let alloc_var = unsafe { symbol::<AllocVar>(&library, "mlx5dv_alloc_var") }?;
        // SAFETY: the type is that of the header.
        let free_var = unsafe { symbol::<FreeVar>(&library, "mlx5dv_free_var") }?;
        Ok(Mlx5 { alloc_var, free_var, _library: library })
    }

    pub(crate) fn alloc_var(&self, context: &Made<Context>) -> Result<Made<Opaque>, Failure> {
        Made::check("alloc_var", call!(self.alloc_var, context.as_ptr(), 0))
    }

    pub(crate) fn free_var(&self, var: Made<Opaque>) {
        call!(self.free_var, var.as_ptr());
    }
}
