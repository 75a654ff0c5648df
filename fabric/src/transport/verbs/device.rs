//! What is asked of an RDMA device: a queue pair and its states, memory that the card knows, where it is found.
//!
//! **UNTESTED ON HARDWARE**, as all of `verbs`. Not here: what is said over the queue pair.

use super::super::{Memory, TransportError};
use super::{DEPTH, GID_INDEX, PORT};
use rdma_mummy_sys as rdma;
use std::ptr::null_mut;

pub(super) fn unavailable(what: &str) -> TransportError {
    TransportError::Unavailable(format!("RDMA: {what}: {}", std::io::Error::last_os_error()))
}

/// An opened device with everything that a link needs. Fields are released in `drop`, in reverse order of creation.
pub(super) struct Device {
    pub(super) context: *mut rdma::ibv_context,
    pub(super) domain: *mut rdma::ibv_pd,
    pub(super) completions: *mut rdma::ibv_cq,
    pub(super) pair: *mut rdma::ibv_qp,
}

// SAFETY: verbs objects may be used from any thread; `Verbs` uses them from one at a time (`&mut`).
unsafe impl Send for Device {}

impl Device {
    /// The first device of this host.
    pub(super) fn open() -> Result<Self, TransportError> {
        let mut this = Self {
            context: null_mut(),
            domain: null_mut(),
            completions: null_mut(),
            pair: null_mut(),
        };
        // SAFETY: each call gets what the one before it returned, after a check; the list is freed after use.
        unsafe {
            let mut count = 0;
            let list = rdma::ibv_get_device_list(&raw mut count);
            if list.is_null() || count == 0 {
                if !list.is_null() {
                    rdma::ibv_free_device_list(list);
                }
                let why = "no RDMA device: is a card in this host, its driver loaded, and rdma-core installed? Use tcp otherwise";
                return Err(TransportError::Unavailable(why.into()));
            }
            this.context = rdma::ibv_open_device(*list);
            rdma::ibv_free_device_list(list);
            if this.context.is_null() {
                return Err(unavailable("opening the device"));
            }
            this.domain = rdma::ibv_alloc_pd(this.context);
            if this.domain.is_null() {
                return Err(unavailable("a protection domain"));
            }
            this.completions = rdma::ibv_create_cq(this.context, DEPTH as i32 + 1, null_mut(), null_mut(), 0);
            if this.completions.is_null() {
                return Err(unavailable("a completion queue"));
            }
            let mut init: rdma::ibv_qp_init_attr = std::mem::zeroed();
            init.send_cq = this.completions;
            init.recv_cq = this.completions;
            init.qp_type = rdma::ibv_qp_type::IBV_QPT_RC;
            init.cap.max_send_wr = DEPTH;
            init.cap.max_recv_wr = 1;
            init.cap.max_send_sge = 1;
            init.cap.max_recv_sge = 1;
            init.sq_sig_all = 1;
            this.pair = rdma::ibv_create_qp(this.domain, &raw mut init);
            if this.pair.is_null() {
                return Err(unavailable("a queue pair"));
            }
        }
        Ok(this)
    }

    pub(super) fn modify(
        &self,
        attributes: &mut rdma::ibv_qp_attr,
        mask: rdma::ibv_qp_attr_mask,
    ) -> Result<(), TransportError> {
        // SAFETY: the pair is open; the attributes live across the call.
        match unsafe { rdma::ibv_modify_qp(self.pair, attributes, mask.0 as i32) } {
            0 => Ok(()),
            _ => Err(unavailable("changing the queue pair's state")),
        }
    }

    /// To `INIT`: the peer may write.
    pub(super) fn init(&self) -> Result<(), TransportError> {
        use rdma::ibv_qp_attr_mask as mask;
        // SAFETY: plain data, for which zeros are valid.
        let mut a: rdma::ibv_qp_attr = unsafe { std::mem::zeroed() };
        a.qp_state = rdma::ibv_qp_state::IBV_QPS_INIT;
        a.port_num = PORT;
        a.qp_access_flags = rdma::ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0;
        self.modify(
            &mut a,
            mask::IBV_QP_STATE | mask::IBV_QP_PKEY_INDEX | mask::IBV_QP_PORT | mask::IBV_QP_ACCESS_FLAGS,
        )
    }

    /// To `RTR` and `RTS`: connected to the peer's pair.
    pub(super) fn connect(&self, peer: &Address, own_psn: u32) -> Result<(), TransportError> {
        use rdma::ibv_qp_attr_mask as mask;
        // SAFETY: plain data, for which zeros are valid.
        let mut a: rdma::ibv_qp_attr = unsafe { std::mem::zeroed() };
        a.qp_state = rdma::ibv_qp_state::IBV_QPS_RTR;
        a.path_mtu = rdma::ibv_mtu::IBV_MTU_1024;
        a.dest_qp_num = peer.pair;
        a.rq_psn = peer.psn;
        a.max_dest_rd_atomic = 1;
        a.min_rnr_timer = 12;
        a.ah_attr.dlid = peer.lid;
        a.ah_attr.port_num = PORT;
        a.ah_attr.is_global = 1;
        a.ah_attr.grh.dgid = rdma::ibv_gid { raw: peer.gid };
        a.ah_attr.grh.sgid_index = GID_INDEX;
        a.ah_attr.grh.hop_limit = 64;
        self.modify(
            &mut a,
            mask::IBV_QP_STATE
                | mask::IBV_QP_AV
                | mask::IBV_QP_PATH_MTU
                | mask::IBV_QP_DEST_QPN
                | mask::IBV_QP_RQ_PSN
                | mask::IBV_QP_MAX_DEST_RD_ATOMIC
                | mask::IBV_QP_MIN_RNR_TIMER,
        )?;
        a.qp_state = rdma::ibv_qp_state::IBV_QPS_RTS;
        a.timeout = 10; // 4 us << 10 = 4 ms, then again
        a.retry_cnt = 7;
        a.rnr_retry = 7;
        a.sq_psn = own_psn;
        a.max_rd_atomic = 1;
        self.modify(
            &mut a,
            mask::IBV_QP_STATE
                | mask::IBV_QP_TIMEOUT
                | mask::IBV_QP_RETRY_CNT
                | mask::IBV_QP_RNR_RETRY
                | mask::IBV_QP_SQ_PSN
                | mask::IBV_QP_MAX_QP_RD_ATOMIC,
        )
    }

    pub(super) fn address(&self, psn: u32) -> Result<Address, TransportError> {
        // SAFETY: the context is open; both results live across the calls, and zeros are valid for them.
        unsafe {
            let mut port: rdma::ibv_port_attr = std::mem::zeroed();
            let mut gid = rdma::ibv_gid { raw: [0; 16] };
            if rdma::ibv_query_port(self.context, PORT, &raw mut port) != 0 {
                return Err(unavailable("asking for the port"));
            }
            if rdma::ibv_query_gid(self.context, PORT, i32::from(GID_INDEX), &raw mut gid) != 0 {
                return Err(unavailable("asking for the port's address"));
            }
            Ok(Address {
                pair: (*self.pair).qp_num,
                psn,
                lid: port.lid,
                gid: gid.raw,
            })
        }
    }

    pub(super) fn registered(&self, memory: Memory, remote: bool) -> Result<Registered, TransportError> {
        use rdma::ibv_access_flags as access;
        let flags = access::IBV_ACCESS_LOCAL_WRITE.0
            | if remote {
                access::IBV_ACCESS_REMOTE_WRITE.0
            } else {
                0
            };
        // SAFETY: the memory is mapped and outlives the registration (see `Registered::drop`).
        let mr =
            unsafe { rdma::ibv_reg_mr(self.domain, memory.address().cast(), memory.bytes(), flags as i32) };
        if mr.is_null() {
            Err(unavailable("registering memory (ulimit -l?)"))
        } else {
            Ok(Registered { mr, memory })
        }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: each was returned by its creator and is released once, the dependent ones first.
        unsafe {
            if !self.pair.is_null() {
                rdma::ibv_destroy_qp(self.pair);
            }
            if !self.completions.is_null() {
                rdma::ibv_destroy_cq(self.completions);
            }
            if !self.domain.is_null() {
                rdma::ibv_dealloc_pd(self.domain);
            }
            if !self.context.is_null() {
                rdma::ibv_close_device(self.context);
            }
        }
    }
}

/// Memory that the card knows. Deregistered before it is unmapped.
pub(super) struct Registered {
    pub(super) mr: *mut rdma::ibv_mr,
    pub(super) memory: Memory,
}

// SAFETY: as for `Device`.
unsafe impl Send for Registered {}

impl Drop for Registered {
    fn drop(&mut self) {
        // SAFETY: registered by `Device::registered`, released once. Synchronous: after it the card writes there no more.
        unsafe { rdma::ibv_dereg_mr(self.mr) };
    }
}

/// Where a queue pair is found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Address {
    pub(super) pair: u32,
    pub(super) psn: u32,
    pub(super) lid: u16,
    pub(super) gid: [u8; 16],
}
