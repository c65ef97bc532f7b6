; The callback of gate.py. Each line has offset, machine code, instruction and purpose. On entry rdi is the address of
; the words, edx the number of the function, and rcx the address of the CUpti_CallbackData.
00: 83 39 01                   cmp DWORD PTR [rcx],0x1                 ; before the call: return
03: 0f 85 af 00 00 00          jne 0xb8
09: 41 89 d0                   mov r8d,edx
0c: 48 8b 47 08                mov rax,QWORD PTR [rdi+0x8]
10: 46 8a 0c 00                mov r9b,BYTE PTR [rax+r8*1]             ; mode = table[number]
14: 45 84 c9                   test r9b,r9b                            ; no mode: Python
17: 0f 84 9c 00 00 00          je 0xb9
1d: f0 48 ff 47 18             lock inc QWORD PTR [rdi+0x18]           ; entered += 1
22: 48 83 7f 10 00             cmp QWORD PTR [rdi+0x10],0x0            ; asking: store it
27: 75 1d                      jne 0x46
29: 41 f6 c1 02                test r9b,0x2                            ; not _WITHOUT_GIL: Python
2d: 0f 84 86 00 00 00          je 0xb9
33: 57                         push rdi
34: 56                         push rsi
35: 52                         push rdx
36: 51                         push rcx
37: 41 51                      push r9
39: ff 57 40                   call QWORD PTR [rdi+0x40]               ; PyGILState_Check()
3c: 41 59                      pop r9
3e: 59                         pop rcx
3f: 5a                         pop rdx
40: 5e                         pop rsi
41: 5f                         pop rdi
42: 85 c0                      test eax,eax                            ; the thread has the GIL: Python
44: 75 73                      jne 0xb9
46: 41 f6 c1 04                test r9b,0x4                            ; _UNSEEN: drop it
4a: 75 67                      jne 0xb3
4c: 48 8b 47 20                mov rax,QWORD PTR [rdi+0x20]
50: 48 2b 47 30                sub rax,QWORD PTR [rdi+0x30]
54: 48 3d a0 0f 00 00          cmp rax,0xfa0                           ; the ring is full: Python
5a: 73 5d                      jae 0xb9
5c: b8 01 00 00 00             mov eax,0x1
61: f0 48 0f c1 47 20          lock xadd QWORD PTR [rdi+0x20],rax      ; slot = ring[written++ % 4096]
67: 25 ff 0f 00 00             and eax,0xfff
6c: c1 e0 06                   shl eax,0x6
6f: 48 03 47 38                add rax,QWORD PTR [rdi+0x38]
73: 4c 8b 41 18                mov r8,QWORD PTR [rcx+0x18]             ; *result
77: 45 8b 00                   mov r8d,DWORD PTR [r8]
7a: 44 89 40 04                mov DWORD PTR [rax+0x4],r8d
7e: 64 4c 8b 04 25 00 00 00 00 mov r8,QWORD PTR fs:0x0                 ; the thread
87: 4c 89 40 08                mov QWORD PTR [rax+0x8],r8
8b: 4c 8b 41 28                mov r8,QWORD PTR [rcx+0x28]             ; context
8f: 4c 89 40 10                mov QWORD PTR [rax+0x10],r8
93: 4c 8b 49 10                mov r9,QWORD PTR [rcx+0x10]             ; five words of arguments
97: 41 0f 10 01                movups xmm0,XMMWORD PTR [r9]
9b: 0f 11 40 18                movups XMMWORD PTR [rax+0x18],xmm0
9f: 41 0f 10 41 10             movups xmm0,XMMWORD PTR [r9+0x10]
a4: 0f 11 40 28                movups XMMWORD PTR [rax+0x28],xmm0
a8: 4d 8b 41 20                mov r8,QWORD PTR [r9+0x20]
ac: 4c 89 40 38                mov QWORD PTR [rax+0x38],r8
b0: 89 10                      mov DWORD PTR [rax],edx                 ; the number last: now take() may read the slot
b2: c3                         ret
b3: f0 48 ff 47 28             lock inc QWORD PTR [rdi+0x28]           ; left_out += 1
b8: c3                         ret
b9: ff 27                      jmp QWORD PTR [rdi]                     ; Python
